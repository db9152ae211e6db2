"""The weighted method: laws of the error of outputs, against brute force in float64."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnquant.theta import weighted
from attnquant.theta.dtypes import BFLOAT16, FLOAT32
from attnquant.theta.lowrank import Fit, fit_plain
from attnquant.theta.weighted import (
    Metric,
    fit_weighted,
    output_energy,
    top_directions,
    weighted_error,
    with_ridge,
)

Float64 = np.ndarray
SHAPES = [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1)]


def matrices(count: int, shape: tuple[int, int], seed: int = 0) -> list[Float64]:
    return list(np.random.default_rng(seed).normal(size=(count, *shape)))


def moments(
    count: int, size: int, *, tokens: int = 40, seed: int = 1
) -> list[np.ndarray]:
    """Second moments in which directions differ in strength, and layers in both."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        mixing = rng.normal(size=(size, size)) * np.geomspace(3, 0.1, size)
        x = rng.normal(size=(tokens, size)) @ mixing
        found.append((x.T @ x / tokens).astype(np.float32))
    return found


def effective(fit: Fit, layer: int) -> Float64:
    left, s, right = (part.astype(np.float64) for part in fit.factors[layer])
    return fit.base.astype(np.float64) + (left * s) @ right


def error(fit: Fit, exact: list[Float64], regular: list[Float64]) -> float:
    """f of the docstring, in float64, of what is stored."""
    total = 0.0
    for layer, (w, c) in enumerate(zip(exact, regular, strict=True)):
        e = w - effective(fit, layer)
        total += float(np.trace(e @ c @ e.T))
    return total


def plain_alternation(
    exact: list[Float64], regular: list[Float64], rank: int, start: int, steps: int
) -> float:
    """Base given residuals and residuals given the base, from a random start."""
    rng = np.random.default_rng(start)
    terms = [0.5 * start * rng.normal(size=w.shape) for w in exact]
    for _ in range(steps):
        pulled = sum((w - t) @ c for w, t, c in zip(exact, terms, regular, strict=True))
        base = pulled @ np.linalg.inv(sum(regular))
        terms = []
        for w, c in zip(exact, regular, strict=True):
            root = np.linalg.cholesky(c)
            u, s, v = np.linalg.svd((w - base) @ root, full_matrices=False)
            terms.append((u[:, :rank] * s[:rank]) @ v[:rank] @ np.linalg.inv(root))
    return sum(
        float(np.trace((w - base - t) @ c @ (w - base - t).T))
        for w, t, c in zip(exact, terms, regular, strict=True)
    )


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
@pytest.mark.parametrize("rank", [1, 2])
def test_two_layers_are_solved_as_well_as_brute_force_can(
    shape: tuple[int, int], rank: int
) -> None:
    exact = matrices(2, shape)
    regular = [with_ridge(c) for c in moments(2, shape[1])]
    found = error(fit_weighted(exact, regular, rank, FLOAT32), exact, regular)
    brute = min(plain_alternation(exact, regular, rank, s, 300) for s in range(4))
    assert found <= brute * (1 + 1e-5)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_two_layers_reach_the_bound_that_no_fit_can_pass(
    shape: tuple[int, int],
) -> None:
    """Only L_1 - L_2 counts: the error is the tail of W_1 - W_2 beyond 2r."""
    exact = matrices(2, shape)
    regular = [with_ridge(c) for c in moments(2, shape[1])]
    parallel = np.linalg.inv(sum(np.linalg.inv(c) for c in regular))
    root = np.linalg.cholesky(parallel)
    s = np.linalg.svd((exact[0] - exact[1]) @ root, compute_uv=False)
    for rank in (1, 2, 3):
        fit = fit_weighted(exact, regular, rank, FLOAT32)
        bound = float(np.square(s[2 * rank :]).sum())
        assert error(fit, exact, regular) == pytest.approx(bound, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("count", [3, 4])
def test_more_layers_are_not_worse_than_plain_alternation(count: int) -> None:
    exact = matrices(count, (6, 9))
    regular = [with_ridge(c) for c in moments(count, 9)]
    found = error(fit_weighted(exact, regular, 2, FLOAT32), exact, regular)
    assert found <= plain_alternation(exact, regular, 2, 0, 8)


def pair_bound(exact: list[Float64], regular: list[Float64], rank: int) -> float:
    """What no fit of two layers or more can pass, from what it is for each pair alone.

    A base of all layers is one of each pair, whose best error is the tail of its
    difference beyond 2r. Every layer is in ``count - 1`` pairs.
    """
    total = 0.0
    for (v, c), (w, d) in combinations(zip(exact, regular, strict=True), 2):
        parallel = np.linalg.inv(np.linalg.inv(c) + np.linalg.inv(d))
        s = np.linalg.svd((v - w) @ np.linalg.cholesky(parallel), compute_uv=False)
        total += float(np.square(s[2 * rank :]).sum())
    return total / (len(exact) - 1)


@given(
    count=st.integers(3, 5),
    shape=st.sampled_from([(6, 9), (9, 6), (12, 8)]),
    rank=st.integers(1, 2),
    seed=st.integers(0, 50),
)
@settings(max_examples=10)
def test_many_turns_end_between_the_bound_and_brute_force(
    count: int, shape: tuple[int, int], rank: int, seed: int
) -> None:
    exact = matrices(count, shape, seed)
    regular = [with_ridge(c) for c in moments(count, shape[1], seed=seed)]
    found = error(
        fit_weighted(exact, regular, rank, FLOAT32, sweeps=60), exact, regular
    )
    brute = min(plain_alternation(exact, regular, rank, s, 60) for s in range(3))
    bound = pair_bound(exact, regular, rank)
    # Turns have minima of their own, of which a restart may find a better one.
    assert bound * (1 - 1e-5) <= found <= 2 * brute


@given(
    count=st.integers(2, 4),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 50),
    tokens=st.integers(1, 30),
)
@settings(max_examples=40)
def test_the_error_never_rises_with_the_rank(
    count: int, shape: tuple[int, int], seed: int, tokens: int
) -> None:
    exact = matrices(count, shape, seed)
    regular = [with_ridge(c) for c in moments(count, shape[1], tokens=tokens)]
    errors = [
        error(fit_weighted(exact, regular, rank, FLOAT32), exact, regular)
        for rank in range(1, min(shape) + 1)
    ]
    scale = sum(
        float(np.trace(w @ c @ w.T)) for w, c in zip(exact, regular, strict=True)
    )
    assert all(after <= before + 1e-9 * scale for before, after in pairwise(errors))


@given(
    count=st.integers(3, 5),
    rank=st.integers(1, 4),
    shape=st.sampled_from([(6, 9), (9, 6)]),
    seed=st.integers(0, 50),
)
@settings(max_examples=30)
def test_the_error_never_rises_over_sweeps(
    count: int, rank: int, shape: tuple[int, int], seed: int
) -> None:
    exact = matrices(count, shape, seed)
    regular = [with_ridge(c) for c in moments(count, shape[1])]
    history: list[float] = []
    fit = fit_weighted(exact, regular, rank, FLOAT32, sweeps=6, history=history)
    assert len(history) > 1
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(history))
    # Rounding and the last step, factors for the base as stored, only take from it.
    assert error(fit, exact, regular) <= min(history) * (1 + 1e-5)


@given(
    rank=st.integers(0, 3),
    seed=st.integers(0, 20),
    order=st.integers(2, 6).flatmap(lambda count: st.permutations(range(count))),
)
@settings(max_examples=30)
def test_the_order_of_layers_changes_no_bit(
    rank: int, seed: int, order: list[int]
) -> None:
    exact = matrices(len(order), (6, 9), seed)
    regular = [with_ridge(c) for c in moments(len(order), 9)]
    straight = fit_weighted(exact, regular, rank, FLOAT32)
    turned = fit_weighted(
        [exact[i] for i in order], [regular[i] for i in order], rank, FLOAT32
    )
    assert turned.base.tobytes() == straight.base.tobytes()
    for place, factors in enumerate(turned.factors):
        for part, same in zip(factors, straight.factors[order[place]], strict=True):
            assert part.tobytes() == same.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_the_full_rank_is_exact_up_to_rounding(
    shape: tuple[int, int], count: int, dtype: np.dtype
) -> None:
    exact = matrices(count, shape)
    regular = [with_ridge(c) for c in moments(count, shape[1])]
    fit = fit_weighted(exact, regular, min(shape), dtype)
    # Of three layers, the base may be some times as large as they are.
    limit = 1e-6 if dtype == FLOAT32 else 3e-2
    for layer, w in enumerate(exact):
        assert np.linalg.norm(effective(fit, layer) - w) <= limit * np.linalg.norm(w)


def test_half_the_full_rank_is_enough_for_two_layers() -> None:
    exact = matrices(2, (6, 9))
    regular = [with_ridge(c) for c in moments(2, 9)]
    fit = fit_weighted(exact, regular, 3, FLOAT32)
    for layer, w in enumerate(exact):
        np.testing.assert_allclose(effective(fit, layer), w, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_equal_layers_are_their_own_base(count: int) -> None:
    exact = matrices(1, (6, 9)) * count
    regular = [with_ridge(c) for c in moments(count, 9)]
    fit = fit_weighted(exact, regular, 2, FLOAT32)
    np.testing.assert_allclose(fit.base, exact[0], atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_fewer_tokens_than_dimensions_are_no_trouble(count: int, tokens: int) -> None:
    exact = matrices(count, (6, 9))
    raw = (
        moments(count, 9, tokens=tokens)
        if tokens
        else [np.zeros((9, 9), np.float32)] * count
    )
    regular = [with_ridge(c) for c in raw]
    fit = fit_weighted(exact, regular, 2, FLOAT32)
    plain = fit_plain([w.astype(np.float32) for w in exact], 2, FLOAT32)
    assert all(np.isfinite(part).all() for f in fit.factors for part in f)
    assert error(fit, exact, regular) <= error(plain, exact, regular)


def test_the_weighted_fit_beats_the_plain_one_at_what_it_minimises() -> None:
    exact = matrices(2, (40, 60))
    raw = moments(2, 60, tokens=200)
    regular = [with_ridge(c) for c in raw]
    fit = fit_weighted(exact, regular, 4, FLOAT32)
    plain = fit_plain([w.astype(np.float32) for w in exact], 4, FLOAT32)
    assert error(fit, exact, regular) < 0.5 * error(plain, exact, regular)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300)])
def test_sampled_directions_are_within_a_hundredth_of_the_best(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    residual = matrices(1, shape)[0]
    metric = Metric(with_ridge(moments(1, shape[1], tokens=500)[0]))
    c = metric(np.eye(shape[1]))

    def left_over() -> float:
        u = top_directions(residual, metric, 16)
        np.testing.assert_allclose(u.T @ u, np.eye(16), atol=1e-12)
        e = residual - u @ (u.T @ residual)
        return float(np.trace(e @ c @ e.T))

    sampled = left_over()
    monkeypatch.setattr(weighted, "_SAMPLED_SHARE", 0)
    exact = left_over()
    assert sampled != exact
    assert exact * (1 - 1e-9) <= sampled <= exact * 1.01


def test_the_same_input_gives_the_same_bytes() -> None:
    exact = matrices(3, (50, 90))
    regular = [with_ridge(c) for c in moments(3, 90, tokens=200)]
    first, second = (fit_weighted(exact, regular, 2, FLOAT32) for _ in range(2))
    assert first.base.tobytes() == second.base.tobytes()
    for ours, theirs in zip(first.factors, second.factors, strict=True):
        assert [p.tobytes() for p in ours] == [p.tobytes() for p in theirs]


def test_errors_and_energies_are_traces() -> None:
    w, c = matrices(1, (30, 50))[0].astype(np.float32), moments(1, 50)[0]
    expected = float(np.trace(w.astype(np.float64) @ c.astype(np.float64) @ w.T))
    assert weighted_error(w, c) == pytest.approx(expected, rel=1e-5)
    assert output_energy(w, c) == pytest.approx(expected, rel=1e-5)


def test_a_ridge_is_a_share_of_the_mean_of_the_diagonal() -> None:
    regular = with_ridge(np.diag([1, 2, 3]).astype(np.float32), 0.1)
    np.testing.assert_allclose(regular, np.diag([1.2, 2.2, 3.2]), rtol=1e-12)


def test_sweeps_have_to_be_positive() -> None:
    exact = matrices(3, (4, 5))
    regular = [with_ridge(c) for c in moments(3, 5)]
    with pytest.raises(ValueError, match="positive"):
        fit_weighted(exact, regular, 1, FLOAT32, sweeps=0)
