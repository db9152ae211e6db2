"""Pieces of references: each against its definition, written out the long way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.testing.numpy_layers import (
    causal_mask,
    gelu_tanh,
    mean_svd_weff,
    rotate,
    silu,
    softcap,
    softmax,
    split_heads,
)

RNG = np.random.default_rng(5)


def test_activations_are_near_their_exact_forms() -> None:
    for x in np.linspace(-6, 6, 41):
        exact = 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
        assert gelu_tanh(np.array(x)) == pytest.approx(exact, abs=5e-4)
        assert silu(np.array(x)) == pytest.approx(x / (1 + math.exp(-x)), abs=1e-15)


def test_softmax_of_large_scores_adds_up_to_one() -> None:
    scores = np.array([[1000.0, 1000.0, -np.inf], [0.0, math.log(3.0), -np.inf]])
    np.testing.assert_allclose(softmax(scores), [[0.5, 0.5, 0], [0.25, 0.75, 0]])


def test_a_soft_cap_bounds_and_none_changes_nothing() -> None:
    x = np.array([-1e6, -0.01, 0.0, 3.0])
    np.testing.assert_allclose(
        softcap(x, 2.0), [-2, -2 * math.tanh(0.005), 0, 2 * math.tanh(1.5)]
    )
    assert softcap(x, None) is x


def test_a_rotation_turns_each_pair_of_lanes_by_its_angle() -> None:
    x = RNG.standard_normal((2, 3, 4))
    angles = RNG.standard_normal((3, 2))
    found = rotate(x, (np.cos(angles), np.sin(angles)))
    for head, token, lane in np.ndindex(2, 3, 2):
        pair = complex(x[head, token, lane], x[head, token, lane + 2])
        turned = pair * complex(math.cos(a := angles[token, lane]), math.sin(a))
        assert found[head, token, lane] == pytest.approx(turned.real)
        assert found[head, token, lane + 2] == pytest.approx(turned.imag)


@given(st.integers(0, 12), st.integers(0, 12), st.none() | st.integers(1, 14))
def test_a_query_sees_itself_and_a_window_of_what_came_before(
    start: int, count: int, window: int | None
) -> None:
    mask = causal_mask(start, start + count, window)
    assert mask.shape == (count, start + count)
    for row, seen in enumerate(mask):
        query = start + row
        first = 0 if window is None else max(0, query - window + 1)
        assert np.flatnonzero(seen).tolist() == list(range(first, query + 1))


def test_heads_are_split_in_order() -> None:
    x = np.arange(12).reshape(2, 6)
    assert split_heads(x, 3).tolist() == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
def test_what_rank_leaves_is_what_its_singular_values_say(
    count: int, out: int, width: int, seed: int
) -> None:
    matrices = list(np.random.default_rng(seed).standard_normal((count, out, width)))
    base = np.mean(matrices, axis=0).astype(np.float32)
    for rank in range(min(out, width) + 1):
        for matrix, effective in zip(
            matrices, mean_svd_weff(matrices, rank), strict=True
        ):
            left = np.linalg.svd(matrix - base, compute_uv=False)[rank:]
            error = np.linalg.norm(matrix - effective)
            assert error == pytest.approx(np.linalg.norm(left), abs=1e-12)
