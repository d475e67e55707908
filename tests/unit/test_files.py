"""Files are whole or not there."""

import os
import shutil
from pathlib import Path

import pytest

from autoprec.errors import OutputError
from autoprec.files import check_writable, write_text


def test_text_is_written_with_unix_line_ends(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "x\ny\n")
    assert (tmp_path / "a.json").read_bytes() == b"x\ny\n"


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OutputError, match=r"a\.json: No space left on device"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_writing_into_a_missing_folder_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere"):
        write_text(tmp_path / "nowhere" / "a.json", "x")


def test_a_missing_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / "demo")
    assert list((tmp_path / "runs" / "demo").iterdir()) == []


def test_a_file_in_the_way_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(OutputError, match="--run-dir"):
        check_writable(tmp_path / "runs")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="/proc is a folder that not even root can write into")
def test_a_read_only_folder_is_an_output_error() -> None:
    with pytest.raises(OutputError, match="/proc"):
        check_writable(Path("/proc"))


def test_a_nearly_full_disk_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match=r"1\.0 MiB left"):
        check_writable(tmp_path)
