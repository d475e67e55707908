"""What an audit takes from a policy: seeds and batches that tuning has used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.audit.prepare import check_checkpoints, num_seen, seeds_seen, unseen_seed
from autoprec.errors import PolicyFileError, WorkloadError
from autoprec.policy import Policy, preset


def policy(**evidence: Any) -> Policy:
    return replace(preset("fp32", "cpu"), evidence=evidence)


def test_the_seed_is_the_first_that_tuning_has_not_used() -> None:
    assert unseen_seed(policy(seeds=[3, 4]), None) == 5
    assert unseen_seed(policy(seed=7), None) == 9  # policies of before: the search's, and the next for the proof
    assert unseen_seed(policy(), None) == 0
    assert unseen_seed(policy(seeds=[3, 4]), 0) == 0


def test_a_seed_that_tuning_used_proves_nothing_new() -> None:
    with pytest.raises(PolicyFileError, match=r"--seed 4: .*tuned with the seeds 3, 4.*give 5 or more"):
        unseen_seed(policy(seeds=[3, 4]), 4)


@pytest.mark.parametrize(("evidence", "count"), [({}, 0), ({"batches": 72}, 72), ({"batches": "x"}, 0)])
def test_batches_that_tuning_has_seen(evidence: dict[str, Any], count: int) -> None:
    assert num_seen(policy(**evidence)) == count


def test_evidence_that_makes_no_sense_is_no_evidence() -> None:
    assert seeds_seen({"seeds": ("a", 2)}) == (2,)
    assert seeds_seen({"seed": "x"}) == ()


def test_checkpoints_come_in_pairs_of_files(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    file.touch()
    check_checkpoints(())
    check_checkpoints((file, file))
    with pytest.raises(WorkloadError, match="--checkpoint was given once; give it twice"):
        check_checkpoints((file,))
    with pytest.raises(WorkloadError, match=r"b\.pt: there is no such file"):
        check_checkpoints((file, tmp_path / "b.pt"))
