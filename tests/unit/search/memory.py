"""Studies in memory, for tests of what is done with one: a study in a file takes 0.3 s to open, and 0.1 s a trial.

What a file keeps and what can be wrong with it is tested in test_study.py.
"""

from typing import Any

import optuna
import pytest


def keep_studies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every storage URL a memory of its own, which lasts as long as the patch."""
    kept: dict[str, optuna.storages.InMemoryStorage] = {}

    class Remembered:  # a class, since Optuna asks what is an instance of it
        def __new__(cls, url: str, **_: Any) -> Any:
            return kept.setdefault(url, optuna.storages.InMemoryStorage())

    monkeypatch.setattr(optuna.storages, "RDBStorage", Remembered)
