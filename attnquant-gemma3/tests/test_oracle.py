"""The oracle equals transformers' records, and has the properties of Gemma 3."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnquant.testing.checkpoints import digest
from attnquant.testing.metrics import cosine_distance, kl_divergence
from gemma3_support import golden
from gemma3_support.oracle import (
    forward,
    greedy,
    substitute_weff,
)
from gemma3_support.tiny import Json, tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

Weights = dict[str, npt.NDArray[Any]]
Tiny = tuple[Weights, dict[str, Any]]

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
# The recorded side is float32: its noise is some 1e-11. A window off by one shows as
# 5e-4, the exact GELU in place of the tanh one as 5e-8.
COSINE_LIMIT: Final = 1e-9
KL_LIMIT: Final = 1e-8


@cache
def tiny(name: str) -> Tiny:
    """Make a recorded checkpoint again, in memory."""
    return make(**(GOLDEN.source(name).recipe or {}))


def make(*, seed: int = 0, **fields: Json) -> Tiny:
    config = tiny_config(**fields)
    return tiny_weights(config, seed), config


@cache
def decomposed(source: str, setting: golden.Setting) -> Tiny:
    weights, config = tiny(source)
    if setting.shared_blocks is None:
        return weights, config
    effective = substitute_weff(
        weights, setting.rank, setting.shared_blocks, setting.families
    )
    return effective, config


def tokens(count: int, seed: int = 0) -> list[int]:
    words = np.random.PCG64(seed).random_raw(count)
    return [int(word % 314) + 6 for word in words]


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


# No deadline: a loaded machine is no defect of the oracle.
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_appended_tokens_leave_earlier_logits_alone(first: int, more: int) -> None:
    weights, config = tiny("tied")
    prompt = tokens(first + more)
    long = forward(weights, config, prompt)[:first]
    np.testing.assert_allclose(
        long, forward(weights, config, prompt[:first]), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(("distance", "seen"), [(127, True), (128, False)])
def test_a_window_of_128_holds_the_token_itself_and_127_before_it(
    *, distance: int, seen: bool
) -> None:
    # One layer, or farther tokens would be seen through nearer ones.
    weights, config = make(num_layers=1)
    prompt = tokens(160)
    other = list(prompt)
    other[-1 - distance] += 1
    before = forward(weights, config, prompt, positions="last")
    after = forward(weights, config, other, positions="last")
    assert seen == bool(np.any(before != after))


def test_tokens_beyond_every_layers_window_do_not_matter() -> None:
    weights, config = make(num_layers=4)
    assert set(config["layer_types"]) == {"sliding_attention"}
    # Four layers of 127 steps back reach the 508 tokens before the last, not a
    # 509th; and keys' rotations are relative.
    prompt = tokens(600)
    cut = prompt[-509:]
    np.testing.assert_allclose(
        forward(weights, config, prompt, positions="last"),
        forward(weights, config, cut, positions="last"),
        rtol=0,
        atol=1e-9,
    )


def test_full_attention_sees_beyond_the_window() -> None:
    weights, config = make(num_layers=6)
    prompt = tokens(700)
    other = [prompt[0] + 1, *prompt[1:]]
    before = forward(weights, config, prompt, positions="last")
    after = forward(weights, config, other, positions="last")
    assert cosine_distance(before, after) > 0.0


def test_the_cache_changes_nothing_but_the_cost() -> None:
    weights, config = tiny("untied")
    prompt = tokens(140)
    stepwise: list[int] = []
    for _ in range(6):
        logits = forward(weights, config, prompt + stepwise, positions="last")
        stepwise.append(int(np.argmax(logits)))
    assert stepwise == greedy(weights, config, prompt, 6)


def test_the_last_position_is_the_last_row_of_all() -> None:
    weights, config = tiny("tied")
    prompt = tokens(30)
    every = forward(weights, config, prompt)
    last = forward(weights, config, prompt, positions="last")
    assert (1, config["vocab_size"]) == last.shape
    np.testing.assert_allclose(last, every[-1:], rtol=0, atol=1e-12)


# --- configurations --------------------------------------------------------------


def test_old_and_new_rope_fields_mean_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = make(rope_scaling=scaling, rope_theta=5e5, rope_local_base_freq=2e4)
    new = make(
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    )
    assert "rope_theta" not in new[1]
    prompt = tokens(50)
    np.testing.assert_array_equal(forward(*old, prompt), forward(*new, prompt))


def test_the_pattern_stands_in_for_absent_layer_types() -> None:
    weights, config = make(sliding_window_pattern=3, sliding_window=16)
    bare = {key: value for key, value in config.items() if key != "layer_types"}
    prompt = tokens(50)
    np.testing.assert_array_equal(
        forward(weights, config, prompt), forward(weights, bare, prompt)
    )


def test_bfloat16_weights_are_widened_exactly() -> None:
    weights, config = make(dtype="bfloat16")
    wide = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    prompt = tokens(20)
    np.testing.assert_array_equal(
        forward(weights, config, prompt), forward(wide, config, prompt)
    )


@pytest.mark.parametrize(
    "field",
    [
        {"query_pre_attn_scalar": 32},
        {"attn_logit_softcapping": 2.0},
        {"final_logit_softcapping": 5.0},
        {"hidden_activation": "gelu"},
        {"rms_norm_eps": 1e-2},
        {"sliding_window": 20},
        {"rope_theta": 5e5},
        {"rope_local_base_freq": 2e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_every_field_reaches_the_logits(field: Mapping[str, Any]) -> None:
    weights, config = tiny("tied")
    prompt = tokens(40)
    before = forward(weights, config, prompt)
    after = forward(weights, {**config, **field}, prompt)
    # Far above the limit of the comparison with transformers.
    assert cosine_distance(before, after) > 10 * COSINE_LIMIT


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_the_oracle_does_not_know_is_refused(
    field: Mapping[str, Any], message: str
) -> None:
    weights, config = tiny("tied")
    with pytest.raises(ValueError, match=message):
        forward(weights, {**config, **field}, [6])


# --- the plain method ------------------------------------------------------------


def test_one_band_per_layer_leaves_the_weights_as_they_are() -> None:
    weights, _ = tiny("tied")
    for name, effective in substitute_weff(weights, 0, 8, "all").items():
        np.testing.assert_array_equal(effective, weights[name])


def test_attn_leaves_the_mlp_alone() -> None:
    weights, _ = tiny("tied")
    replaced = substitute_weff(weights, 4, 3, "attn")
    changed = {name for name in weights if replaced[name] is not weights[name]}
    assert {name for name in weights if "_proj" in name and "attn" in name} == changed


# --- metrics ---------------------------------------------------------------------


def test_metrics_report_the_worst_row() -> None:
    a = np.array([[1.0, 0.0], [1.0, 0.0]])
    b = np.array([[2.0, 0.0], [0.0, 3.0]])
    assert cosine_distance(a, b) == pytest.approx(1.0)
    p = np.log([[0.5, 0.5], [0.75, 0.25]])
    q = np.log([[0.5, 0.5], [0.25, 0.75]]) + 7.0
    assert kl_divergence(p, q) == pytest.approx(0.5 * np.log(3.0))
    assert kl_divergence(p, p) == 0.0
    assert cosine_distance(a, a) == 0.0
