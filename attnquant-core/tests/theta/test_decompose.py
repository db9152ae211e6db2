"""Decomposition: the laws of the method, against an independent float64 oracle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnquant.theta import (
    decompose_standard_state_dict_to_attnquant,
    reconstruct,
    relative_frobenius_error,
)
from attnquant.theta.decompose import iter_decomposed, projection_shapes
from attnquant.theta.layout import make_layout
from attnquant.theta.names import BaseKey, is_theta_name
from core_support import oracle
from core_support.tiny import (
    BFLOAT16,
    FULL_RANK,
    SHAPES,
    assert_same_bits,
    bits,
    finite_bfloat16,
    square_weights,
    tiny_weights,
    weight_name,
)

decompose = decompose_standard_state_dict_to_attnquant


def error_of(weights: dict, rank: int, blocks: int) -> float:
    return relative_frobenius_error(
        weights, reconstruct(decompose(weights, rank, blocks))
    )


def test_the_error_is_zero_at_passthrough_for_every_rank_from_4_to_256() -> None:
    weights = square_weights(2, 256)
    errors = {
        rank: relative_frobenius_error(
            weights, reconstruct(decompose(weights, rank, 2, tie_families="attn"))
        )
        for rank in range(4, 257)
    }
    assert dict.fromkeys(range(4, 257), 0.0) == errors


@given(
    num_layers=st.integers(2, 7),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=12)
def test_the_error_never_rises_with_rank_and_ends_at_zero(
    num_layers: int, blocks: int, seed: int
) -> None:
    weights = tiny_weights(num_layers, seed=seed)
    blocks = min(blocks, num_layers - 1)
    errors = [error_of(weights, rank, blocks) for rank in range(1, FULL_RANK + 1)]
    assert all(more < less for less, more in pairwise(errors))
    assert errors[-1] < 1e-6


@given(
    num_layers=st.integers(1, 7),
    blocks=st.integers(1, 7),
    rank=st.integers(1, FULL_RANK),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_effective_weights_are_those_of_the_oracle(
    num_layers: int, blocks: int, rank: int, seed: int
) -> None:
    weights = tiny_weights(num_layers, seed=seed)
    blocks = min(blocks, num_layers)
    expected = oracle.effective_weights(weights, num_layers, blocks, rank)
    found = reconstruct(decompose(weights, rank, blocks))
    assert sorted(expected) == sorted(found)
    for name, exact in expected.items():
        np.testing.assert_allclose(found[name], exact, rtol=0, atol=2e-5, err_msg=name)


def test_the_error_is_that_of_the_oracle_at_a_larger_size() -> None:
    weights = square_weights(4, 64, seed=3)
    approximation = oracle.effective_weights(weights, 4, 2, 16)
    name = weight_name(2, "down_proj")
    exact = weights[name].astype(np.float64)
    found = reconstruct(decompose(weights, 16, 2))
    expected = oracle.relative_error(exact, approximation[name])
    assert relative_frobenius_error(weights[name], found[name]) == pytest.approx(
        expected, rel=1e-6
    )


def test_every_finite_bfloat16_survives_passthrough_as_a_base() -> None:
    weights = tiny_weights(2, dtype=BFLOAT16) | {
        weight_name(layer, "q_proj"): finite_bfloat16() for layer in range(2)
    }
    theta = decompose(weights, None, 2)
    assert bits(finite_bfloat16()) == bits(theta["W0.1.q_proj"])


def test_every_bfloat16_survives_in_a_kept_tensor() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(BFLOAT16)
    theta = decompose(tiny_weights(2) | {"norm.weight": every}, 3, 1)
    assert bits(every) == bits(theta["norm.weight"])


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, BFLOAT16, np.int64, np.uint8, bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_tensors_that_are_no_projection_are_handed_through(
    dtype: np.dtype, shape: tuple[int, ...]
) -> None:
    buffer = np.ones(shape, dtype)
    theta = decompose(tiny_weights(2) | {"layers.0.buffer": buffer}, 3, 1)
    assert bits(buffer) == bits(theta["layers.0.buffer"])


def test_untied_projections_are_handed_through() -> None:
    weights = tiny_weights(4)
    theta = decompose(weights, 3, 2, tie_families="attn")
    kept = {name: theta[name] for name in theta if not is_theta_name(name)}
    expected = {n: w for n, w in weights.items() if "self_attn" not in n}
    assert_same_bits(expected, kept)


@given(seed=st.integers(1, 1000), family=st.sampled_from(tuple(SHAPES)))
@settings(max_examples=10)
def test_a_base_and_its_factors_depend_on_no_other_tensor(
    seed: int, family: str
) -> None:
    weights, others = tiny_weights(4), tiny_weights(4, seed=seed)
    band = {
        weight_name(layer, family): weights[weight_name(layer, family)]
        for layer in (2, 3)
    }
    ours = decompose(weights, 3, 2)
    theirs = decompose(others | band, 3, 2)
    names = [f"W0.1.{family}"] + [
        f"layers.{layer}.{family}.{factor}" for layer in (2, 3) for factor in "UsV"
    ]
    assert_same_bits({n: ours[n] for n in names}, {n: theirs[n] for n in names})


def test_the_same_input_gives_the_same_bits() -> None:
    assert_same_bits(decompose(tiny_weights(4), 3, 2), decompose(tiny_weights(4), 3, 2))


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (np.float32, None, np.float32),
        (BFLOAT16, None, BFLOAT16),
        (np.float16, None, np.float32),
        (np.float64, None, np.float32),
        (np.float32, "bfloat16", BFLOAT16),
        (BFLOAT16, "float32", np.float32),
    ],
)
def test_theta_is_in_the_storage_dtype(
    stored: np.dtype, asked: str | None, expected: np.dtype
) -> None:
    theta = decompose(tiny_weights(2, dtype=stored), 3, 1, dtype=asked)
    found = {array.dtype for name, array in theta.items() if is_theta_name(name)}
    assert {np.dtype(expected)} == found
    assert theta["norm.weight"].dtype == stored


def test_factors_make_up_for_the_rounding_of_a_bfloat16_base() -> None:
    # Layers that hardly differ from a base that bfloat16 rounds by up to 2**-9.
    base, small = tiny_weights(1, seed=1), tiny_weights(2, seed=2)
    weights = {
        weight_name(layer, family): base[weight_name(0, family)]
        + np.float32(1e-3) * small[weight_name(layer, family)]
        for family in SHAPES
        for layer in range(2)
    }
    rounded = decompose(weights, FULL_RANK, 1, dtype="bfloat16")
    error = relative_frobenius_error(weights, reconstruct(rounded))
    assert error < 1e-4


def test_the_recorded_error_is_that_of_what_is_stored() -> None:
    weights = tiny_weights(4, dtype=BFLOAT16)
    layout = make_layout(
        projection_shapes(weights), num_layers=4, shared_blocks=2, lora_rank=3
    )
    parts = [p for p in iter_decomposed(weights, layout) if p.base.family == "q_proj"]
    theta = {name: array for part in parts for name, array in part.tensors.items()}
    names = [weight_name(layer, "q_proj") for layer in range(4)]
    exact = np.stack([weights[name].astype(np.float64) for name in names])
    weff = reconstruct(theta)
    difference = exact - np.stack([weff[name] for name in names])
    assert sum(part.squared_error for part in parts) == pytest.approx(
        np.square(difference).sum(), rel=1e-4
    )
    assert sum(part.squared_norm for part in parts) == pytest.approx(
        np.square(exact).sum()
    )


def test_progress_is_told_of_every_base() -> None:
    told: list[BaseKey] = []
    decompose(tiny_weights(4), 3, 2, progress=told.append)
    assert [BaseKey(band, "", family) for family in SHAPES for band in (0, 1)] == told


def test_only_one_base_is_read_at_a_time() -> None:
    weights = tiny_weights(4)
    read: list[str] = []

    class Recorder(dict):
        def __getitem__(self, name: str) -> np.ndarray:
            read.append(name)
            return super().__getitem__(name)

    layout = make_layout(
        projection_shapes(weights), num_layers=4, shared_blocks=2, lora_rank=3
    )
    next(iter_decomposed(Recorder(weights), layout))
    assert [weight_name(0, "q_proj"), weight_name(1, "q_proj")] == read
