"""SIGTERM is Ctrl-C while a run goes on, and both wait while a result is written."""

import os
import signal
import threading

import pytest

from autoprec.search.interrupt import terminated_as_interrupted, uninterrupted

BOTH = [signal.SIGINT, signal.SIGTERM]


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in BOTH]


def test_sigterm_interrupts_and_its_handler_comes_back() -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert handlers() == before


@pytest.mark.parametrize("number", BOTH)
def test_neither_interrupts_while_a_result_is_written(number: signal.Signals) -> None:
    with terminated_as_interrupted():
        before = handlers()
        with uninterrupted():
            os.kill(os.getpid(), number)
        assert handlers() == before
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_another_thread_goes_without() -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with terminated_as_interrupted(), uninterrupted():
                pass
        except BaseException as error:
            failures.append(error)

    before = handlers()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (failures, handlers()) == ([], before)
