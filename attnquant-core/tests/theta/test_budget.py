"""Ranks from a budget: what spectra predict, and what is made of the bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnquant.errors import CheckpointError, SettingError
from attnquant.theta.budget import RANK_STEP, Curve, choose_ranks, spread_budget
from attnquant.theta.bundle import open_bundle
from attnquant.theta.decompose import iter_decomposed, reconstruct
from attnquant.theta.dtypes import FLOAT32
from attnquant.theta.lowrank import Fit, fit_plain, plain_gains
from attnquant.theta.names import BaseKey
from attnquant.theta.weighted import fit_weighted, weighted_gains, with_ridge
from attnquant.theta.writer import Plan, write_bundle
from core_support.bundles import plan, write_tiny_statistics
from core_support.tiny import (
    square_weights,
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
)

SIZE = 20
"""Side of the projections; a step of ranks more than fits into half of it."""


def drawn(count: int, shape: tuple[int, int], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(count)]


def drawn_moments(count: int, size: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    roots = [
        rng.normal(size=(40, size)) * np.geomspace(3, 0.1, size) for _ in "x" * count
    ]
    return [with_ridge((x.T @ x / 40).astype(np.float32)) for x in roots]


def left_over(
    fit: Fit, matrices: Sequence[np.ndarray], metrics: Sequence[np.ndarray]
) -> float:
    total = 0.0
    for index, (w, c) in enumerate(zip(matrices, metrics, strict=True)):
        e = w.astype(np.float64) - fit.base
        if fit.factors:
            u, s, v = (part.astype(np.float64) for part in fit.factors[index])
            e -= (u * s) @ v
        total += float(np.trace(e @ c @ e.T))
    return total


@pytest.mark.parametrize("shape", [(7, 11), (11, 7)])
@pytest.mark.parametrize("count", [2, 3])
def test_the_plain_error_at_each_rank_is_what_gains_leave(
    shape: tuple[int, int], count: int
) -> None:
    matrices = drawn(count, shape, 0)
    gains = plain_gains(matrices)
    metrics = [np.eye(shape[1])] * count
    for rank in range(8):
        found = left_over(fit_plain(matrices, rank, FLOAT32), matrices, metrics)
        assert found == pytest.approx(gains[rank:].sum(), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("shape", [(7, 11), (11, 7), (8, 8)])
def test_the_weighted_error_of_two_layers_is_what_gains_leave(
    shape: tuple[int, int],
) -> None:
    matrices, moments = drawn(2, shape, 0), drawn_moments(2, shape[1], 1)
    gains = weighted_gains(matrices, moments)
    for rank in range(min(shape) + 1):
        fit = fit_weighted(matrices, moments, rank, FLOAT32)
        found = left_over(fit, matrices, moments)
        assert found == pytest.approx(gains[rank:].sum(), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("shape", [(7, 11), (11, 7)])
@pytest.mark.parametrize("count", [3, 4])
def test_the_weighted_error_of_more_layers_is_no_more_than_gains_leave(
    shape: tuple[int, int], count: int
) -> None:
    matrices, moments = drawn(count, shape, 0), drawn_moments(count, shape[1], 1)
    gains = weighted_gains(matrices, moments)
    for rank in range(min(shape) + 1):
        fit = fit_weighted(matrices, moments, rank, FLOAT32)
        found = left_over(fit, matrices, moments)
        assert found <= gains[rank:].sum() * (1 + 1e-4) + 1e-8
        if rank == 0:
            assert found == pytest.approx(gains.sum(), rel=1e-5)


@given(
    count=st.integers(2, 4),
    shape=st.sampled_from([(3, 5), (5, 3), (1, 4)]),
    seed=st.integers(0, 30),
)
@settings(max_examples=20)
def test_gains_fall_from_rank_to_rank(
    count: int, shape: tuple[int, int], seed: int
) -> None:
    matrices = drawn(count, shape, seed)
    for gains in (
        plain_gains(matrices),
        weighted_gains(matrices, drawn_moments(count, shape[1], seed)),
    ):
        assert gains.shape == (min(shape),)
        assert gains.min() >= 0
        assert (np.diff(gains) <= 0).all()


def curve_of(falls: list[float], cost: int) -> Curve:
    return Curve(np.sort(np.array(falls))[::-1], cost)


curves = st.lists(
    st.builds(
        curve_of,
        st.lists(st.integers(0, 9).map(float), min_size=1, max_size=3 * RANK_STEP + 2),
        st.integers(1, 30),
    ),
    min_size=1,
    max_size=4,
).map(lambda found: {BaseKey(i, "", "q_proj"): c for i, c in enumerate(found)})


def gained(curves: dict[BaseKey, Curve], ranks: dict[BaseKey, int]) -> float:
    return sum(curves[base].gains[:rank].sum() for base, rank in ranks.items())


def taken(curves: dict[BaseKey, Curve], ranks: dict[BaseKey, int]) -> int:
    return sum(curves[base].cost * rank for base, rank in ranks.items())


@given(curves, st.integers(0, 2000), st.integers(0, 300))
def test_more_room_never_gains_less_and_no_more_is_taken_than_there_is(
    curves: dict[BaseKey, Curve], room: int, more: int
) -> None:
    small, large = choose_ranks(curves, room), choose_ranks(curves, room + more)
    assert taken(curves, small) <= room
    assert taken(curves, large) <= room + more
    assert gained(curves, large) >= gained(curves, small) - 1e-9
    for base, rank in small.items():
        assert rank % RANK_STEP == 0 or rank == len(curves[base].gains)


@given(curves, st.integers(0, 2000))
def test_no_choice_of_ranks_gains_more_than_a_step_beyond(
    curves: dict[BaseKey, Curve], room: int
) -> None:
    options = [
        [*range(0, len(curve.gains), RANK_STEP), len(curve.gains)]
        for curve in curves.values()
    ]
    every = (
        dict(zip(curves, ranks, strict=True)) for ranks in itertools.product(*options)
    )
    best = max(gained(curves, r) for r in every if taken(curves, r) <= room)
    step = max(curve.gains[:RANK_STEP].sum() for curve in curves.values())
    found = gained(curves, choose_ranks(curves, room))
    assert best - step - 1e-9 <= found <= best + 1e-9


def test_nothing_is_spent_where_nothing_is_gained() -> None:
    base, other = BaseKey(0, "", "q_proj"), BaseKey(1, "", "q_proj")
    curves = {
        base: Curve(np.zeros(16), 1),
        other: Curve(np.r_[np.ones(8), np.zeros(8)], 1),
    }
    assert choose_ranks(curves, 1000) == {base: 0, other: 8}


def wide_plan(folder: Path, method: str, **options: object) -> Plan:
    """Plan a model whose layers differ more and more, so that ranks must as well."""
    weights = square_weights(4, SIZE)
    for family, strength in (("q_proj", 5.0), ("k_proj", 0.01)):
        for layer in (2, 3):
            weights[weight_name(layer, family)] *= np.float32(strength)
    for name in ("v_proj", "o_proj"):
        weights[weight_name(1, name)] = weights[weight_name(0, name)]
    model = write_checkpoint(folder / "model", weights, tiny_config(4))
    if method == "weighted":
        options["statistics"] = write_tiny_statistics(folder / "statistics", model)
    return plan(model, rank=1, **options)


def sizes(ready: Plan) -> tuple[int, int]:
    """Return what rank 0 and the full rank take, by the error that names them."""
    with pytest.raises(SettingError) as caught:
        spread_budget(ready, 0)
    words = caught.value.expected.split()
    return int(words[1]), int(words[words.index("to") + 1].rstrip(","))


@pytest.mark.parametrize("method", ["mean-svd", "weighted"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 1.0])
def test_a_bundle_takes_no_more_than_its_budget(
    tmp_path: Path, method: str, share: float
) -> None:
    ready = wide_plan(tmp_path, method)
    lowest, highest = sizes(ready)
    budget = lowest + int(share * (highest - lowest))
    chosen = spread_budget(ready, budget)
    written = write_bundle(chosen, tmp_path / "bundle")
    assert lowest <= written.bundle_bytes <= budget
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.info.layout == chosen.layout
    ranks = chosen.layout.base_ranks
    if share in {0.3, 0.6}:
        assert budget - written.bundle_bytes < RANK_STEP * 2 * (2 * SIZE + 1) * 4
        # Equal layers are their base; those that are far apart get most.
        assert ranks[BaseKey(0, "", "v_proj")] == 0 < ranks[BaseKey(1, "", "v_proj")]
        assert {rank % RANK_STEP for rank in ranks.values() if rank < SIZE} == {0}
    if share == 0:
        assert set(ranks.values()) == {0}
    # What is at rank 0 is read like everything else.
    weights = reconstruct(bundle.checkpoint.tensors, bundle.info.layout)
    assert len(weights) == 28
    if share == 1:
        assert max(bundle.info.error.values()) < 1e-5


@pytest.mark.parametrize("method", ["mean-svd", "weighted"])
def test_the_same_budget_gives_the_same_ranks_and_seen_is_each_base(
    tmp_path: Path, method: str
) -> None:
    ready = wide_plan(tmp_path, method)
    lowest, highest = sizes(ready)
    seen: list[str] = []
    first = spread_budget(ready, (lowest + highest) // 2, seen.append)
    assert spread_budget(ready, (lowest + highest) // 2).layout == first.layout
    assert len(seen) == len(set(seen)) == len(ready.layout.bases)
    # The rank of the plan does not matter.
    full = ready.layout.with_ranks(dict.fromkeys(ready.layout.bases, SIZE))
    other = Plan(ready.checkpoint, ready.tensors, full, ready.dtype, ready.statistics)
    assert spread_budget(other, (lowest + highest) // 2).layout == first.layout


def lost(ready: Plan) -> float:
    """Sum, over bases, what is lost relative to the mean energy of a layer."""
    total = 0.0
    parts = iter_decomposed(ready.tensors, ready.layout, ready.dtype, ready.statistics)
    for part in parts:
        error, norm = part.squared_error, part.squared_norm
        if part.output_error is not None:
            error, norm = part.output_error, part.output_norm
        total += error / norm
    return total


@pytest.mark.parametrize("method", ["mean-svd", "weighted"])
def test_ranks_by_budget_lose_less_than_one_rank_of_the_same_bytes(
    tmp_path: Path, method: str
) -> None:
    ready = wide_plan(tmp_path, method)
    lowest, _ = sizes(ready)
    even = ready.layout.with_ranks(dict.fromkeys(ready.layout.bases, RANK_STEP))
    even_plan = Plan(
        ready.checkpoint, ready.tensors, even, ready.dtype, ready.statistics
    )
    budget = write_bundle(even_plan, tmp_path / "even").bundle_bytes
    assert budget > lowest
    assert lost(spread_budget(ready, budget)) < 0.9 * lost(even_plan)


def test_how_large_outputs_are_does_not_matter(tmp_path: Path) -> None:
    ready = wide_plan(tmp_path / "a", "weighted")
    weights = {
        name: array * np.float32(1024 if "q_proj" in name else 1)
        for name, array in ((n, ready.tensors[n]) for n in ready.tensors)
    }
    louder = write_checkpoint(tmp_path / "b" / "model", weights, tiny_config(4))
    budget = sum(sizes(ready)) // 2
    statistics = write_tiny_statistics(tmp_path / "b" / "statistics", louder)
    scaled = plan(louder, rank=1, statistics=statistics)
    assert spread_budget(scaled, budget).layout == spread_budget(ready, budget).layout


@pytest.mark.parametrize("beyond", [-1, 1])
def test_a_budget_that_no_ranks_meet_names_both_bounds(
    tmp_path: Path, beyond: int
) -> None:
    ready = wide_plan(tmp_path, "mean-svd")
    bounds = sizes(ready)
    factors = 28 * SIZE * (2 * SIZE + 1) * 4
    assert bounds[1] - bounds[0] == factors
    budget = bounds[0] - 1 if beyond < 0 else bounds[1] + 1
    with pytest.raises(SettingError) as caught:
        spread_budget(ready, budget)
    assert caught.value.subject == "budget"
    assert caught.value.found == f"{budget} bytes"
    for bound in bounds:
        spread_budget(ready, bound)


def test_without_shared_bases_there_is_nothing_to_spread(tmp_path: Path) -> None:
    ready = wide_plan(tmp_path, "mean-svd", blocks=4)
    with pytest.raises(SettingError, match="no base is shared"):
        spread_budget(ready, 10**6)


def test_a_matrix_that_is_not_finite_is_named(tmp_path: Path) -> None:
    weights = tiny_weights(4)
    weights[weight_name(1, "k_proj")][2, 7] = np.nan
    model = write_checkpoint(tmp_path / "model", weights, tiny_config(4))
    ready = plan(model, rank=1)
    budget = sum(sizes(ready)) // 2
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.self_attn\.k_proj"
    ) as caught:
        spread_budget(ready, budget)
    assert "finite" in caught.value.expected
