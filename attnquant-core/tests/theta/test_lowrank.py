"""The plain method for one base: an exact mean, and the best low-rank term."""

from __future__ import annotations

import numpy as np
import pytest

from attnquant.theta.dtypes import BFLOAT16, FLOAT32
from attnquant.theta.lowrank import (
    Factors,
    apply_factors,
    is_sampled,
    mean_base,
    truncated_svd,
)
from core_support.oracle import best_approximation
from core_support.tiny import bits, finite_bfloat16

SHAPES = [(8, 8), (5, 9), (9, 5), (1, 7), (7, 1), (1, 1)]


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_mean_of_one_matrix_is_that_matrix_bit_for_bit() -> None:
    matrix = finite_bfloat16()
    assert bits(matrix) == bits(mean_base([matrix], BFLOAT16))


def test_the_mean_is_summed_in_float64() -> None:
    # In float32 the ones would be lost beside 2**24 until it is subtracted.
    values = [2.0**24, 1.0, 1.0, -(2.0**24)]
    matrices = [np.full((1, 1), value, np.float32) for value in values]
    assert mean_base(matrices, FLOAT32) == np.float32(0.5)


def test_the_mean_is_rounded_to_the_storage_dtype() -> None:
    matrices = [random((4, 6), seed) for seed in range(3)]
    expected = np.mean([m.astype(np.float64) for m in matrices], axis=0)
    assert bits(expected.astype(BFLOAT16)) == bits(mean_base(matrices, BFLOAT16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_factors_make_the_best_approximation(shape: tuple[int, int], rank: int) -> None:
    rank = min(rank, *shape)
    residual = random(shape)
    found = apply_factors(
        np.zeros(shape, np.float32), truncated_svd(residual, rank, FLOAT32)
    )
    expected = best_approximation(residual.astype(np.float64), rank)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_factors_have_the_shapes_of_the_design(shape: tuple[int, int]) -> None:
    rank = min(shape)
    u, s, v = truncated_svd(random(shape), rank, FLOAT32)
    assert ((shape[0], rank), (rank,), (rank, shape[1])) == (u.shape, s.shape, v.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_vectors_are_orthonormal_and_values_fall(shape: tuple[int, int]) -> None:
    u, s, v = truncated_svd(random(shape), min(shape), FLOAT32)
    np.testing.assert_allclose(u.T @ u, np.eye(min(shape)), atol=1e-5)
    np.testing.assert_allclose(v @ v.T, np.eye(min(shape)), atol=1e-5)
    assert (np.diff(s) <= 0).all()
    assert (s > 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_the_singular_values(shape: tuple[int, int]) -> None:
    residual = random(shape)
    expected = np.linalg.svd(residual.astype(np.float64), compute_uv=False)
    found = truncated_svd(residual, min(shape), FLOAT32).s
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_signs_do_not_depend_on_the_sign_that_lapack_chose(
    shape: tuple[int, int],
) -> None:
    u = truncated_svd(random(shape), min(shape), FLOAT32).U
    assert (u[np.abs(u).argmax(axis=0), np.arange(u.shape[1])] > 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_residual_has_zero_values_and_no_nan(shape: tuple[int, int]) -> None:
    factors = truncated_svd(np.zeros(shape, np.float32), min(shape), FLOAT32)
    assert all(np.isfinite(part).all() for part in factors)
    assert not factors.s.any()


def test_a_rank_above_the_residuals_adds_nothing() -> None:
    residual = np.outer(random((6,)), random((4,), 1)).astype(np.float32)
    factors = truncated_svd(residual, 4, FLOAT32)
    np.testing.assert_allclose(factors.s[1:], 0, atol=1e-6)
    found = apply_factors(np.zeros_like(residual), factors)
    np.testing.assert_allclose(found, residual, atol=1e-6)


def test_factors_are_stored_in_the_storage_dtype() -> None:
    factors = truncated_svd(random((5, 4)), 2, BFLOAT16)
    assert {BFLOAT16} == {part.dtype for part in factors}


def test_the_effective_weight_is_base_plus_low_rank_term() -> None:
    base, u, s, v = random((3, 4)), random((3, 2)), random((2,)), random((2, 4))
    exact = [part.astype(np.float64) for part in (base, u, s, v)]
    expected = (exact[0] + exact[1] @ np.diag(exact[2]) @ exact[3]).astype(np.float32)
    found = apply_factors(base, Factors(u, s, v))
    assert found.dtype == FLOAT32
    np.testing.assert_array_equal(found, expected)


def test_without_factors_the_effective_weight_is_the_base() -> None:
    base = finite_bfloat16()
    found = apply_factors(base, None)
    assert bits(base.astype(np.float32)) == bits(found)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300)])
@pytest.mark.parametrize("rank", [16, 64])
def test_a_sampled_range_costs_a_hundredth_of_the_error_at_most(
    shape: tuple[int, int], rank: int
) -> None:
    assert is_sampled(rank, shape)
    # The slow decay of real residuals; noise alone would have none.
    residual = random(shape) * np.geomspace(1, 0.1, shape[1], dtype=np.float32)
    factors = truncated_svd(residual, rank, FLOAT32)
    found = apply_factors(np.zeros(shape, np.float32), factors)
    best = best_approximation(residual.astype(np.float64), rank)
    ours, least = (np.linalg.norm(residual - part) for part in (found, best))
    assert least * (1 - 1e-6) <= ours <= least * 1.01
    np.testing.assert_allclose(factors.U.T @ factors.U, np.eye(rank), atol=1e-5)
    np.testing.assert_allclose(factors.V @ factors.V.T, np.eye(rank), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_small_matrices_are_diagonalised_not_sampled(shape: tuple[int, int]) -> None:
    assert not is_sampled(1, shape)
