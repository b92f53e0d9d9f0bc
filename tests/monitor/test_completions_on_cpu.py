import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.monitor.completions import NGRAM, group_shares, repetition


@given(st.lists(st.integers(0, 2), max_size=60))
def test_it_is_the_share_of_tokens_in_an_ngram_that_comes_again(ids):
    ngrams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    repeated = {i + k for i, ngram in enumerate(ngrams) if ngrams.count(ngram) > 1 for k in range(NGRAM)}
    assert repetition(ids) == pytest.approx(len(repeated) / max(len(ids), 1))


def test_large_token_ids_are_told_apart():
    once = [150_000 + i * 7 for i in range(1000)]
    assert repetition(once) == 0
    assert repetition(once * 2) == 1


@pytest.mark.parametrize(
    ("groups", "shares"),
    [
        ([[(1, 1), (1, 1)], [(0, 0), (1, 1)]], (0.5, 0.0)),
        ([[(1, 0), (0, 0)], [(0, 0), (1, 1)], [(2, 0), (1, 0)], [(0, 0), (0, 0)]], (0.25, 2 / 3)),
        ([[(1, 1), (1, 1)]], (1.0, None)),
        ([[(1, None), (0, 1)]], (0.0, None)),
    ],
)
def test_groups_with_equal_rewards_and_other_groups_without_a_right_answer(groups, shares):
    scores = [[{"score": s} | ({} if a is None else {"acc": a}) for s, a in group] for group in groups]
    assert group_shares(scores, "score", "acc") == shares
