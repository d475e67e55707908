"""Records: file and back is the identity, whatever the numbers are."""

import json
import math
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec.records import dump_record, load_record, save_record
from autoprec.records.codec import decode, encode
from autoprec.records.run import FidelityRecord, Interval, RunRecord, TrialRecord
from tests.unit.records.samples import RUN

TRIALS = st.from_type(TrialRecord)


def same(a: object, b: object) -> bool:
    """Return whether two values are equal, nan to nan, and 0 not to -0."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(st.from_type(Interval), st.from_type(FidelityRecord))
def test_values_come_back(interval: Interval, fidelity: FidelityRecord) -> None:
    for value in (interval, fidelity):
        back = decode(type(value), json.loads(json.dumps(encode(value), allow_nan=False)))
        assert same(
            [getattr(back, name) for name in type(value).__slots__],
            [getattr(value, name) for name in type(value).__slots__],
        )


@given(
    st.text(),
    st.lists(st.floats(), max_size=5),
    st.dictionaries(st.text(), st.lists(st.floats(), max_size=3).map(tuple), max_size=3),
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_record_comes_back_and_has_the_same_bytes_again(
    tmp_path: Path, name: str, losses: list[float], chaos: dict[str, tuple[float, ...]], options: dict[str, object]
) -> None:
    name = name.encode("utf-8", "ignore").decode()
    record: RunRecord = replace(RUN, name=name, reference_losses=tuple(losses), chaos_losses=chaos, options=options)
    save_record(record, tmp_path / "record.json")
    back = load_record(tmp_path / "record.json")
    assert dump_record(back) == dump_record(record)
    assert same(back.reference_losses, record.reference_losses)
    assert back.name == name
