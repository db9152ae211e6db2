"""What would end MAX's worker is refused, with what is wrong and what may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from max.pipelines.context.exceptions import InputError
from max.pipelines.context.sampling_params import SamplingParams
from transformers import PretrainedConfig

from attnquant.serving.requests import check_sampling, check_tokens, vocabulary_size

VOCABULARY = 320


@given(tokens=st.lists(st.integers(0, VOCABULARY - 1)))
def test_tokens_of_the_vocabulary_are_accepted(tokens: list[int]) -> None:
    check_tokens(tokens, VOCABULARY)


@given(
    before=st.lists(st.integers(0, VOCABULARY - 1)),
    outside=st.one_of(
        st.integers(max_value=-1), st.integers(VOCABULARY), st.just(1 << 70)
    ),
    after=st.lists(st.integers()),
)
def test_the_first_token_without_an_embedding_is_named(
    before: list[int], outside: int, after: list[int]
) -> None:
    with pytest.raises(InputError) as refused:
        check_tokens([*before, outside, *after], VOCABULARY)
    assert f"token {len(before)} is {outside}" in str(refused.value)
    assert "0 to 319" in str(refused.value)


def test_a_choice_of_more_tokens_than_there_are_is_refused() -> None:
    for fine in (-1, 0, 1, VOCABULARY):
        check_sampling(SamplingParams(top_k=fine), VOCABULARY)
    with pytest.raises(InputError, match="top_k is 321, and there are 320 tokens"):
        check_sampling(SamplingParams(top_k=321), VOCABULARY)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_a_seed_beyond_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match=f"seed is {seed}"):
        check_sampling(SamplingParams(seed=seed), VOCABULARY)


def test_a_number_of_tokens_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InputError, match="max_tokens is"):
        check_sampling(SamplingParams(max_new_tokens=1 << 64), VOCABULARY)
    with pytest.raises(InputError, match="min_tokens is"):
        check_sampling(SamplingParams(min_new_tokens=1 << 64), VOCABULARY)


def test_the_vocabulary_is_that_of_the_model_of_text() -> None:
    assert vocabulary_size(PretrainedConfig(vocab_size=VOCABULARY)) == VOCABULARY
    whole = PretrainedConfig(text_config=PretrainedConfig(vocab_size=7), vocab_size=9)
    assert vocabulary_size(whole) == 7
