import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.repetition import NGRAM, repetition


@given(st.lists(st.integers(0, 2), max_size=60))
def test_it_is_the_share_of_tokens_in_an_ngram_that_comes_again(ids):
    ngrams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    repeated = {i + k for i, ngram in enumerate(ngrams) if ngrams.count(ngram) > 1 for k in range(NGRAM)}
    assert repetition(ids) == pytest.approx(len(repeated) / max(len(ids), 1))


def test_large_token_ids_are_told_apart():
    once = [150_000 + i * 7 for i in range(1000)]
    assert repetition(once) == 0
    assert repetition(once * 2) == 1
