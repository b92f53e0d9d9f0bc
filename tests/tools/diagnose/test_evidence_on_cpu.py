import pytest
from rollout_files import LETTER_COUNTING as DEMO
from rollout_files import write_rollouts

from gtpo_verl.tools.diagnose.evidence import EVIDENCE, would_gtpo_change_it
from gtpo_verl.tools.diagnose.rollout_stats import read_rollouts

HALF_SHARED = [("1234", 1.0, 1), ("1256", 0.0, 0)]


@pytest.mark.parametrize(
    ("completions", "first", "studied", "answer", "why"),
    [
        ([("12", 1.0, 1), ("34", 0.0, 0)], 1, 0.5, "no", "share no token"),
        ([("12", 1.0, 1), ("12345678", 0.0, 0), ("1", 1.0, 1)], 1, 0.5, "no", "already sees whether"),
        (HALF_SHARED, 1, 0.7, "no evidence", "the study had 6"),
        (HALF_SHARED, 100, 0.5, "no evidence", "in steps 1 to 20"),
        (HALF_SHARED, 1, 0.5, "perhaps", "conflict at 50%: "),
    ],
)
def test_whether_gtpo_would_change_it(tmp_path, monkeypatch, completions, first, studied, answer, why):
    other, found = EVIDENCE["shares"][:2]
    found = found | {"share": studied, "to": studied + 0.1}
    ranges = [other | {"share": studied - 0.08, "from": studied - 0.1}, found]
    monkeypatch.setitem(EVIDENCE, "shares", ranges)
    folder = write_rollouts(tmp_path / "rollouts", [completions] * 20, first)
    gtpo = would_gtpo_change_it(read_rollouts(folder, str(DEMO), 8, 50), False)
    assert gtpo["answer"] == answer and why in gtpo["why"]
    if completions is HALF_SHARED:
        assert gtpo["either"] == gtpo["forward"] == 0.5 and gtpo["backward"] == 0
    low, high = found["effects"]["clean endings"][1:]
    quoted = f"[{low:+.2f}, {high:+.2f}]".replace("-", "−")
    assert (quoted in gtpo["why"]) is (answer == "perhaps")


def test_both_models_are_quoted_at_the_share_that_is_nearest():
    answer = would_gtpo_change_it(read_rollouts(DEMO, str(DEMO), None, 50), False)
    assert answer["answer"] == "perhaps" and answer["why"].count("pairs,") == 2
    assert "conflict at 68%: clean" in answer["why"] and answer["why"].endswith("SmolLM2-135M)")
    assert would_gtpo_change_it(None, True)["answer"] == "no"
    assert would_gtpo_change_it(None, False) == {
        "answer": "cannot tell",
        "why": "that needs the run's completions: --rollouts",
    }
