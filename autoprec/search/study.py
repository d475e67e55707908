"""The Optuna study behind a run: asked, told, resumed. The only file that imports Optuna."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import optuna
import sqlalchemy.exc
from optuna.trial import FrozenTrial, TrialState

from autoprec.errors import RecordError, StudyError
from autoprec.records.codec import decode, encode
from autoprec.records.run import TrialKind, TrialRecord
from autoprec.records.run import TrialState as RecordState
from autoprec.search.choices import Dimension, Value, active
from autoprec.search.pareto import GOALS, Aim, goals, violation
from autoprec.search.storage import (
    SCHEMA_VERSION,
    advice,
    check_identity,
    check_not_locked,
    check_sqlite,
    engine_kwargs,
    sqlite_path,
)

T = TypeVar("T")

# Round by round a trial is held against the best faithful one. The test is repeated every round, so its threshold is
# far below the chance that a trial as fast as the best may take of being pruned in a single look.
_PRUNE_P = 0.02
_PRUNE_AFTER_ROUNDS = 4
_CURVE_STEPS, _CURVE_TOLERANCE = 8, 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A trial that waits for its measurement; a baseline has no choice."""

    number: int
    kind: TrialKind
    name: str
    choice: Mapping[str, Value]


class Study:
    """An Optuna study of step-time ratios (candidate over FP32, smaller is better) under a fidelity constraint.

    With the aim `pareto` it also makes memory and the predicted gradient error small, and cuts no trial short for being
    slower than another one.

    Every method raises `StudyError` if the storage is locked, full or gone.
    """

    def __init__(
        self, study: optuna.Study, storage: str, rows: Sequence[Dimension], *, resumed: bool, aim: Aim = "time"
    ) -> None:
        self._study, self.aim = study, aim
        self._storage = storage
        self._rows = tuple(rows)
        self._open: dict[int, optuna.Trial] = {}
        self.resumed = resumed

    def enqueue(self, kind: TrialKind, name: str, choice: Mapping[str, Value]) -> None:
        """Put a trial in the queue, unless the study has one of this kind and name already."""
        with _storage_errors(self._storage):
            known = [trial.user_attrs for trial in self._study.get_trials(deepcopy=False)]
            if all((attrs.get("kind"), attrs.get("name")) != (kind, name) for attrs in known):
                self._study.enqueue_trial(dict(choice), user_attrs={"kind": kind, "name": name})

    def remember_curve(self, losses: Sequence[float]) -> None:
        """Store the FP32 losses of a new study; of a resumed one, see that they are still the same.

        They tell what no fingerprint does: other data, another optimizer or loss. Later steps are not compared, since
        kernels that are not deterministic drift apart there.

        Raises: `StudyError` naming the first step whose loss differs by more than a hundredth.
        """
        with _storage_errors(self._storage):
            stored = self._study.user_attrs.get("fp32_losses")
            if stored is None:
                self._study.set_user_attr("fp32_losses", list(losses))
                return
        for step, (then, now) in enumerate(zip(stored[:_CURVE_STEPS], losses, strict=False), 1):
            if not math.isclose(then, now, rel_tol=_CURVE_TOLERANCE):
                raise StudyError(
                    f"cannot resume study {self._study.study_name} in {self._storage}: the FP32 loss of step {step} "
                    f"was {then:.6g} then and is {now:.6g} now, so data, loss, optimizer or model have changed; "
                    "pass another --study NAME or --run-dir to start a new one"
                )

    def ask(self) -> Asked:
        """Return the next trial: the oldest in the queue, or else one that the sampler proposes."""
        with _storage_errors(self._storage):
            trial = self._study.ask()
            self._open[trial.number] = trial
            if "kind" not in trial.user_attrs:
                trial.set_user_attr("kind", "search")
                trial.set_user_attr("name", f"search-{trial.number}")
            kind: TrialKind = trial.user_attrs["kind"]
            choice = {} if kind == "baseline" else self._suggest(trial)
            return Asked(number=trial.number, kind=kind, name=trial.user_attrs["name"], choice=choice)

    def report(self, asked: Asked, round_number: int, ratio: float) -> bool:
        """Store the step-time ratio of one round; return whether the trial is slower than the best beyond doubt."""
        with _storage_errors(self._storage):
            trial = self._open[asked.number]
            if self.aim == "pareto":  # Optuna has no pruner for several objectives
                return False
            trial.report(ratio, round_number)
            return trial.should_prune()

    def tell(self, record: TrialRecord) -> None:
        """Store a finished trial, with all that was measured."""
        with _storage_errors(self._storage):
            trial = self._open.pop(record.number)
            trial.set_user_attr("record", encode(record))
            state = _state(record)
            values = goals(record, self.aim) if state == TrialState.COMPLETE else None
            if values is None:
                state = TrialState.FAIL if state == TrialState.COMPLETE else state
            if record.fidelity is not None:
                trial.set_constraint("fidelity", violation(record.fidelity))
            self._study.tell(trial, values, state)

    def tell_duplicate(self, asked: Asked, original: TrialRecord) -> TrialRecord:
        """Store that a trial is the same policy as a measured one, with that one's outcome; return its record."""
        with _storage_errors(self._storage):
            rounds = self._study.get_trials(deepcopy=False)[original.number].intermediate_values
            for number, ratio in rounds.items():  # none where there are several objectives
                self._open[asked.number].report(ratio, number)
        record = replace(
            original,
            number=asked.number,
            name=asked.name,
            kind=asked.kind,
            choice=asked.choice,
            state="duplicate",
            duplicate_of=original.number,
            reason=f"same policy as {original.name}",
            wall_s=0.0,
            losses=(),
            step_times_s=(),
            reference_step_times_s=(),
        )
        self.tell(record)
        return record

    def put_back(self, asked: Asked) -> None:
        """End a trial that was interrupted and put it in the queue again, unless it was told already."""
        with _storage_errors(self._storage):
            self._open.pop(asked.number, None)
            trial = self._study.get_trials(deepcopy=False)[asked.number]
            if not trial.state.is_finished():
                _retry(self._study, trial)

    def trials(self) -> tuple[TrialRecord, ...]:
        """Return the records of all finished trials, oldest first; interrupted ones left none."""
        with _storage_errors(self._storage):
            attrs = [trial.user_attrs for trial in self._study.get_trials(deepcopy=False)]
        found = [each["record"] for each in attrs if "record" in each]
        try:
            return tuple(decode(TrialRecord, data, "trial") for data in found)
        except RecordError as error:
            raise StudyError(f"study {self._storage}: {error}; {advice(error)}") from error

    def has_waiting(self, kind: TrialKind) -> bool:
        """Return whether a trial of this kind is in the queue."""
        with _storage_errors(self._storage):
            waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            return any(trial.user_attrs.get("kind") == kind for trial in waiting)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Value]:
        by_name = {row.name: row for row in self._rows}
        low = str(trial.suggest_categorical("low", by_name["low"].values))
        return {row.name: _suggested(trial, row) for row in active(self._rows, low)}


def open_study(
    storage: str,
    name: str,
    *,
    identity: Mapping[str, str | int | float],
    rows: Sequence[Dimension],
    seed: int,
    note: Callable[[str], None],
    aim: Aim = "time",
) -> Study:
    """Return the study `name` in `storage`, a new one or the one an earlier run left.

    `identity` says what was measured; a stored study must have the same. Trials that a crash left running are put
    back in the queue. `note` receives what Optuna logs.

    Raises: `StudyError` if the storage cannot be used or the stored study is about something else.
    """
    check_sqlite(storage)
    _log_to(note)
    with _storage_errors(storage):
        backend = optuna.storages.RDBStorage(storage, engine_kwargs=engine_kwargs(storage))
        is_known = name in optuna.get_all_study_names(backend)
        if is_known:
            stored = optuna.load_study(study_name=name, storage=backend).user_attrs
            check_identity(stored, identity, storage, name)
        directions = [optuna.study.StudyDirection.MINIMIZE] * len(GOALS[aim])
        study = optuna.create_study(storage=backend, study_name=name, directions=directions, load_if_exists=True)
        for key, value in ({} if is_known else {"autoprec": SCHEMA_VERSION, **identity}).items():
            study.set_user_attr(key, value)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            _retry(study, trial)
        # A resumed run must not repeat the random numbers of the run before it.
        study.sampler = _sampler(seed + len(study.get_trials(deepcopy=False)))
        study.pruner = _pruner()
    return Study(study, storage, rows, resumed=is_known, aim=aim)


def stored_horizon(storage: str, name: str) -> int | None:
    """Return the horizon of the study `name` if `storage` has it: a resumed run keeps it.

    Raises: `StudyError` if the storage cannot be used or written, or has a study of this name that is not ours.
    """
    check_sqlite(storage)
    path = sqlite_path(storage)
    if path is not None and (not path.exists() or path.stat().st_size == 0):
        return None
    with _storage_errors(storage):
        backend = optuna.storages.RDBStorage(storage, engine_kwargs=engine_kwargs(storage))
        if path is not None:
            check_not_locked(storage, path)
        if name not in optuna.get_all_study_names(backend):
            return None
        attrs = optuna.load_study(study_name=name, storage=backend).user_attrs
    check_identity(attrs, {}, storage, name)
    horizon = attrs.get("horizon")
    return horizon if isinstance(horizon, int) else None


def _retry(study: optuna.Study, trial: FrozenTrial) -> None:
    """Fail a running trial and enqueue it again, at the front of what is sampled but behind what waits already."""
    params = trial.system_attrs.get("fixed_params", trial.params)
    study.tell(trial.number, state=TrialState.FAIL)
    names: dict[str, Any] = {key: trial.user_attrs[key] for key in ("kind", "name") if key in trial.user_attrs}
    study.enqueue_trial(dict(params), user_attrs=names)


def _state(record: TrialRecord) -> TrialState:
    """Return Optuna's state of a trial; a duplicate has that of a whole trial if it has times."""
    states: Mapping[RecordState, TrialState] = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    if record.state == "duplicate":
        return TrialState.PRUNED if record.speedup is None else TrialState.COMPLETE
    return states.get(record.state, TrialState.FAIL)


def _suggested(trial: optuna.Trial, row: Dimension) -> Value:
    value = trial.suggest_categorical(row.name, row.values)
    assert value is not None
    return value


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    # group: baselines have no parameters and the loss scale exists only for fp16, so no parameter is in every trial.
    return _quiet(lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True))


def _pruner() -> optuna.pruners.BasePruner:
    return _quiet(lambda: optuna.pruners.WilcoxonPruner(p_threshold=_PRUNE_P, n_startup_steps=_PRUNE_AFTER_ROUNDS))


def _quiet(make: Callable[[], T]) -> T:
    """Return what `make` makes, without Optuna's remark that it is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return make()


class _NoteHandler(logging.Handler):
    """Hands log records on as text."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


def _log_to(note: Callable[[str], None]) -> None:
    optuna.logging.disable_default_handler()
    optuna.logging.disable_propagation()
    logger = logging.getLogger("optuna")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _NoteHandler)]:
        logger.removeHandler(handler)
    logger.addHandler(_NoteHandler(note))


@contextmanager
def _storage_errors(storage: str) -> Iterator[None]:
    """Turn what Optuna and SQLAlchemy raise about a storage into a `StudyError`."""
    try:
        yield
    except sqlalchemy.exc.ArgumentError as error:  # no URL, or no driver for it
        raise StudyError(f'cannot open study storage "{storage}": {error}; use sqlite:///FILE') from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = error.__cause__ or error
        reason = str(getattr(cause, "orig", None) or cause).splitlines()[0]
        raise StudyError(f"cannot use study {storage}: {reason}; {advice(cause)}") from error
    except (ImportError, ValueError) as error:
        raise StudyError(f'cannot open study storage "{storage}": {error}; use sqlite:///FILE') from error
    except RuntimeError as error:
        raise StudyError(f"cannot open study {storage}: {error}; {advice(error)}") from error
