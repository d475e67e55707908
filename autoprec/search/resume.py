"""Starting a study, or going on with the one that an earlier run left."""

import hashlib
from dataclasses import replace

from autoprec.search.objective import Objective
from autoprec.search.observer import Observer
from autoprec.search.pareto import Aim
from autoprec.search.places import Places
from autoprec.search.study import Study, open_study
from autoprec.search.subject import Subject


def resume_or_start(
    subject: Subject, objective: Objective, places: Places, observer: Observer, aim: Aim = "time"
) -> Study:
    """Return the open study.

    Raises: `StudyError` if the storage cannot be used or holds a study of something else, or of the same model
    trained otherwise.
    """
    study = open_study(
        places.storage,
        places.study,
        identity=identity_of(subject, objective.protocol.horizon) | {"objective": aim},
        aim=aim,
        rows=subject.rows,
        seed=subject.seed,
        note=observer.note,
    )
    study.remember_curve(objective.losses)
    if study.resumed:
        observer.note(f"resuming study {places.study}: {len(study.trials())} trials are there already")
    return study


def identity_of(subject: Subject, horizon: int) -> dict[str, str | int | float]:
    """Return what a study is about: a run is resumed only if all of it is the same."""
    choices = repr([(row.name, row.values) for row in subject.rows])
    marks = repr(sorted((str(site), low, each.verdict) for (site, low), each in subject.catalog.layout.marks.items()))
    beyond = {f"{low} beyond": plans for low, plans in subject.catalog.layout.beyond.items() if plans}
    fronts = {**subject.catalog.layout.fronts, **beyond}
    plans = repr([(low, [sorted(map(str, sites)) for sites in fronts[low]]) for low in sorted(fronts)])
    return {
        "graph": subject.op_graph.fingerprint(),
        "device": subject.device.name,
        "threads": subject.device.num_threads,
        "torch": subject.device.torch_version,
        "seed": subject.seed,
        "horizon": horizon,
        "space": replace(subject.space, horizon=horizon).fingerprint(),
        "choices": _hash(choices),
        "marks": _hash(marks),  # a choice keeps in FP32 what they say; a deadline may have cut them short
        "plans": _hash(plans),  # `cut-3` must stay what it was
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
