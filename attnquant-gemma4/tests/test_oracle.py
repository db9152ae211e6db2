"""The oracle equals transformers' records, and has the properties of Gemma 4."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from attnquant.testing.checkpoints import digest
from attnquant.testing.metrics import cosine_distance
from gemma4_support import golden
from gemma4_support.oracle import (
    forward,
    greedy,
    sharers,
    substitute_weff,
)
from gemma4_support.tiny import Json, tiny_config, tiny_weights

Weights = dict[str, npt.NDArray[Any]]
Tiny = tuple[Weights, dict[str, Any]]

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
# The recorded side is float32: its noise is some 1e-11.
COSINE_LIMIT: Final = 1e-9
KL_LIMIT: Final = 1e-8


@cache
def tiny(name: str) -> Tiny:
    """Make a recorded checkpoint again, in memory."""
    return make(**GOLDEN.source(name).recipe)


def make(*, seed: int = 0, **fields: Json) -> Tiny:
    config = tiny_config(**fields)
    return tiny_weights(config, seed), config


@cache
def decomposed(source: str, setting: golden.Setting) -> Tiny:
    weights, config = tiny(source)
    if setting.shared_blocks is None:
        return weights, config
    effective = substitute_weff(
        weights, config, setting.rank, setting.shared_blocks, setting.families
    )
    return effective, config


def tokens(count: int, seed: int = 0) -> list[int]:
    words = np.random.PCG64(seed).random_raw(count)
    return [int(word % 290) + 25 for word in words]


# --- against transformers --------------------------------------------------------


@pytest.mark.parametrize("source", GOLDEN.sources, ids=lambda source: source.name)
def test_the_recorded_checkpoints_are_made_again_bit_by_bit(
    source: golden.Source,
) -> None:
    assert digest(tiny(source.name)[0]) == source.digest


@pytest.mark.parametrize("record", GOLDEN.records, ids=lambda record: record.name)
def test_logits_equal_those_of_transformers(record: golden.Record) -> None:
    logits = forward(*decomposed(record.source, record.setting), record.tokens)
    distance, kl = golden.compare(record, logits)
    assert distance < COSINE_LIMIT
    assert kl < KL_LIMIT


@pytest.mark.parametrize("record", GOLDEN.records, ids=lambda record: record.name)
def test_greedy_tokens_equal_those_of_transformers(record: golden.Record) -> None:
    weights, config = decomposed(record.source, record.setting)
    steps = len(record.greedy)
    expected = list(record.greedy)
    assert expected == greedy(weights, config, record.tokens, steps, np.float32)


# --- properties of the model -----------------------------------------------------


def test_appended_tokens_leave_earlier_logits_alone() -> None:
    weights, config = tiny("experts")
    prompt = tokens(40)
    np.testing.assert_allclose(
        forward(weights, config, prompt)[:23],
        forward(weights, config, prompt[:23]),
        rtol=0,
        atol=1e-9,
    )


def test_tokens_beyond_the_window_are_seen_by_full_layers_alone() -> None:
    weights, config = make(layer_types="sf")
    prompt = tokens(160)
    other = [prompt[0] + 1, *prompt[1:]]
    before = forward(weights, config, prompt, positions="last")
    after = forward(weights, config, other, positions="last")
    assert cosine_distance(before, after) > 0.0


@pytest.mark.parametrize(
    "field",
    [
        {"final_logit_softcapping": None},
        {"rms_norm_eps": 1e-2},
        {"sliding_window": 20},
        {"enable_moe_block": False},
        {"top_k_experts": 3},
    ],
    ids=lambda field: next(iter(field)),
)
def test_every_field_reaches_the_logits(field: dict[str, Any]) -> None:
    weights, config = tiny("experts")
    changed = {**config, "text_config": {**config["text_config"], **field}}
    prompt = tokens(40)
    before = forward(weights, config, prompt)
    after = forward(weights, changed, prompt)
    # Far above the limit of the comparison with transformers.
    assert cosine_distance(before, after) > 10 * COSINE_LIMIT


def test_every_tensor_reaches_the_logits() -> None:
    weights, config = tiny("experts")
    prompt = tokens(12)
    before = forward(weights, config, prompt)
    for name, tensor in weights.items():
        if name.endswith("layers.2.layer_scalar"):
            # The last norm takes it out again.
            continue
        # Not times a constant: a norm may follow.
        changed = tensor * np.linspace(0.9, 1.1, tensor.size).reshape(tensor.shape)
        if tensor.size == 1:
            changed = tensor * 1.1
        after = forward({**weights, name: changed}, config, prompt)
        assert cosine_distance(before, after) > 10 * COSINE_LIMIT, name


# --- the plain method ------------------------------------------------------------


def test_layers_of_different_kinds_share_nothing() -> None:
    _, config = tiny("pattern")
    assert sharers(config, "q_proj", 4) == [[0, 1], [2], [3, 4], [5]]
    assert sharers(config, "v_proj", 2) == [[0, 1, 2], [3, 4]]
    assert sharers(config, "up_proj", 2) == [[0, 1, 2], [3, 4, 5]]
    assert sharers(config, "q_proj", 1) == [[0, 1, 2, 3, 4], [5]]
