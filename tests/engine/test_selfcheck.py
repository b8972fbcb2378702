"""What a check found is kept under its key, until somebody asks to measure again."""

from pathlib import Path

from soloist.engine.selfcheck import cached_check, card_prints, forget_checks


def test_an_outcome_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    runs = []

    def run() -> list[str]:
        runs.append(1)
        return ["E2"]

    assert cached_check("a", run, tmp_path) == cached_check("a", run, tmp_path) == ["E2"]
    assert len(runs) == 1
    cached_check("b", run, tmp_path)
    assert len(runs) == 2
    forget_checks(tmp_path)
    cached_check("a", run, tmp_path)
    assert len(runs) == 3


def test_a_card_is_asked_again_after_a_change_of_code_or_driver() -> None:
    assert set(card_prints()) == {"code", "cuda", "driver"} and len(card_prints()["code"]) == 16
