import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.measure.cast_time import CastTime
from autoprec.measure.op_call import Kept
from autoprec.measure.paired import Timing
from autoprec.measure.time_cache import (
    OpTime,
    StoredTimes,
    cache_file,
    cache_folder,
    load_times,
    nothing_stored,
    save_times,
)
from autoprec.runtime.device import DeviceInfo

DEVICE = DeviceInfo(
    kind="cpu", name="a CPU", capability={}, formats=("fp32", "bf16"), native_formats=("fp32",), num_threads=1,
    torch_version="9.9",
)  # fmt: skip
KEPT = Kept(outputs=("bfloat16",), saved_inputs=(0, 2), saved_outputs=(0,), fresh_bytes=64)
FAST = OpTime(timing=Timing(forward_s=1e-5, backward_s=2e-5, spread=0.1, num_rounds=7), kept=KEPT)
NEVER = OpTime(timing=Timing(forward_s=math.inf, backward_s=math.inf, reason="no kernel"), kept=Kept())


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPREC_CACHE", str(tmp_path / "times"))
    return tmp_path / "times"


def stored(**ops):
    casts = {"bf16 down dense": (CastTime(numel=64, forward_s=1e-6, backward_s=2e-6),)}
    return StoredTimes(device="a CPU", torch="9.9", num_threads=1, ops=ops, casts=casts)


def test_what_is_saved_comes_back():
    times = stored(**{"linear(float32[4,8]*)": {"fp32": FAST, "bf16": NEVER}})
    assert save_times(DEVICE, times) == ()
    assert load_times(DEVICE) == (times, ())


def test_the_file_starts_with_its_version_and_leaves_nothing_beside_it(folder):
    save_times(DEVICE, stored(one={"fp32": FAST}))
    (path,) = folder.iterdir()
    assert path == cache_file(folder, DEVICE)
    assert next(iter(json.loads(path.read_text()))) == "schema_version"


def test_what_another_run_stored_meanwhile_stays():
    save_times(DEVICE, stored(one={"fp32": FAST}))
    save_times(DEVICE, stored(one={"bf16": NEVER}, two={"fp32": FAST}))
    assert load_times(DEVICE)[0].ops == {"one": {"fp32": FAST, "bf16": NEVER}, "two": {"fp32": FAST}}


def test_casts_of_more_sizes_are_kept():
    few, many = stored(), replace(stored(), casts={"bf16 down dense": stored().casts["bf16 down dense"] * 2})
    assert few.merged(many).casts == many.merged(few).casts == many.casts


@pytest.mark.parametrize(
    "other",
    [
        replace(DEVICE, name="another CPU"),
        replace(DEVICE, torch_version="10.0"),
        replace(DEVICE, num_threads=2),
    ],
)
def test_another_device_torch_or_number_of_threads_has_its_own_file(other):
    save_times(DEVICE, stored(one={"fp32": FAST}))
    assert load_times(other) == (nothing_stored(other), ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "damaged or not autoprec's"),
        ("[1, 2]", "damaged or not autoprec's"),
        ("{}", "damaged or not autoprec's"),
        ('{"schema_version": 1, "device": "a CPU"}', "damaged or not autoprec's"),
        ('{"schema_version": 99}', "has schema 99, and this autoprec uses 1"),
        ("\x00\x01", "damaged or not autoprec's"),
        (
            '{"schema_version": 1, "device": "x", "torch": "9.9", "num_threads": 1, "ops": {}, "casts": {}}',
            "of another device or torch version",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_noted_and_replaced(folder, text, words):
    folder.mkdir()
    path = cache_file(folder, DEVICE)
    path.write_text(text)
    found, (note,) = load_times(DEVICE)
    assert found == nothing_stored(DEVICE)
    assert words in note
    assert str(path) in note
    assert "measured anew" in note
    save_times(DEVICE, stored(one={"fp32": FAST}))
    assert load_times(DEVICE) == (stored(one={"fp32": FAST}), ())


def test_bytes_that_are_no_text_are_noted(folder):
    folder.mkdir()
    cache_file(folder, DEVICE).write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in load_times(DEVICE)[1][0]


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", ""])
def test_the_variable_switches_the_cache_off(monkeypatch, tmp_path, word):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPREC_CACHE", word)
    assert cache_folder() is None
    assert save_times(DEVICE, stored(one={"fp32": FAST})) == ()
    assert load_times(DEVICE) == (nothing_stored(DEVICE), ())
    assert list(tmp_path.iterdir()) == []


def test_without_the_variable_it_is_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("AUTOPREC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autoprec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "home" / ".cache" / "autoprec"


def test_a_folder_that_cannot_be_written_is_noted(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPREC_CACHE", str(tmp_path / "file" / "times"))
    (note,) = save_times(DEVICE, stored(one={"fp32": FAST}))
    assert "not stored" in note
    assert "AUTOPREC_CACHE" in note
