"""Around the workload of a command."""

import gc

import pytest
import typer

from autoprec.cli.running import running


def test_what_a_workload_prints_is_not_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    with running():
        typer.echo("epoch 1")
    typer.echo("result")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("result\n", "epoch 1\n")


def test_what_is_loaded_is_frozen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    for count, expected in ((0, 1), (7, 1)):
        monkeypatch.setattr(gc, "get_freeze_count", lambda count=count: count)
        with running():
            assert len(calls) == expected
