import pytest

from studies.block7 import REASONING, decision, push, table, touched

LINE, SHORT, WORD = 198, 44, 537


def completion(after, advantage, length=8):
    ids = [*REASONING, LINE, after, *[WORD] * (length - 6)]
    return {"ids": ids, "advantages": [0.0] * 5 + [advantage] + [9.0] * (length - 6)}


def test_the_decision_is_the_first_token_behind_the_tag_that_is_not_blank():
    assert decision([LINE, *REASONING, LINE, LINE, WORD]) == 7
    assert decision([*REASONING, SHORT]) == 4
    assert decision([*REASONING, LINE]) is None and decision([WORD, *REASONING, WORD]) is None and decision([]) is None


def test_the_push_is_the_gradient_on_the_difference_of_logits():
    """One short completion of four: A = 2 over 8 tokens; the others -1, 0 and 3 over 10, 8 and 6."""
    others = [completion(WORD, -1.0, 10), completion(WORD, 0.0), completion(WORD, 3.0, 6)]
    step = [completion(SHORT, 2.0), *others, {"ids": [WORD], "advantages": [5.0]}]
    assert push(step) == pytest.approx(2 / 8 * 3 / 4 - (-1 / 10 + 3 / 6) / 4)
    assert push([{"ids": [WORD], "advantages": [5.0]}]) == 0


def test_a_token_is_touched_if_its_weight_is_not_one():
    first = {"a": 0.5, "advantages": [1.0, 0.5, 0.5]}
    assert touched([[first], [{"a": -1.0, "advantages": [0.0]}]]) == 0.5


def test_the_papers_masks_push_towards_short_answers_and_those_who_keep_their_answers_do_not():
    _, rows = table()
    first = {arm: float(pushes.split(", ")[0].replace("−", "-")) for arm, pushes, *_ in rows}
    assert first["both masks"] > 0.5 and abs(first["GRPO"]) < 0.1
    assert {arm for arm, *cells in rows if all(float(end.split(", ")[1]) > 0.2 for end in cells[1::2])} == {
        "both masks, equal outcomes gated",
        "both masks, clamped",
    }
