"""Two processes that train together over gloo, kept alive between tests: starting torch twice takes seconds."""

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RANKS = 2
_COLLECTIVE_S, _SCENARIO_S, _START_S = 20, 60, 120  # a rank that waits for a dead one gives up, so that tests end


class TwoRanks:
    """Runs functions on both ranks at once. A failure ends the pair; the next run starts another."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `scenario(rank, *args)` returned on each rank; it must be importable and its results picklable.

        Raises: `AssertionError` with the traceback of the rank that failed.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((scenario, args))
        answers = [_answer(pipe, _SCENARIO_S) for pipe in self._pipes]
        failures = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
        if failures:
            self.end()
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def end(self) -> None:
        """End both processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = Path(tempfile.mkdtemp(prefix="autoprec-ranks-")) / "store"
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(meeting), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        errors = [error for error, _ in (_answer(pipe, _START_S) for pipe in self._pipes) if error]
        if errors:
            self.end()
            raise AssertionError("\n".join(errors))


PAIR = TwoRanks()
"""The pair of this process, for whoever needs one; a test takes the fixture `ranks`."""


def _answer(pipe: Connection, limit_s: float) -> tuple[str, Any]:
    try:
        return pipe.recv() if pipe.poll(limit_s) else (f"no answer within {limit_s} s", None)
    except EOFError:
        return "the process died", None


def _serve(rank: int, meeting: str, pipe: Connection) -> None:
    """Run scenarios until told to end."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with _told(pipe):
        store = dist.FileStore(meeting, RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=_COLLECTIVE_S)
        )
        pipe.send(("", None))
    while (task := pipe.recv()) is not None:
        scenario, args = task
        with _told(pipe):
            torch.manual_seed(0)
            pipe.send(("", scenario(rank, *args)))
    dist.destroy_process_group()


@contextlib.contextmanager
def _told(pipe: Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        pipe.send((traceback.format_exc(), None))
