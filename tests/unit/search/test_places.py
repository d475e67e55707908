"""Where a run writes."""

from pathlib import Path

from autoprec.search.places import claim_places


def test_each_study_of_a_folder_has_plans_of_its_own(tmp_path: Path) -> None:
    names = ["gpt", "gpt-2", "gpt.2", "gpt/2", "gpt 2", "gpt%2", "gpt_2"]
    places = [claim_places("gpt", None, tmp_path / "run", None, name) for name in names]
    assert len({each.fronts for each in places}) == len(names)
    assert {each.fronts.parent for each in places} == {tmp_path / "run"}
    assert claim_places("gpt", None, tmp_path / "run", None, None).fronts == places[0].fronts
