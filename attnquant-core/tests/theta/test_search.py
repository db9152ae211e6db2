"""Bands that are searched: no contiguous split loses less."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.theta.decompose import iter_decomposed
from attnquant.theta.families import PerFamily
from attnquant.theta.search import best_split, search_bands
from core_support.bundles import plan, write_tiny_statistics
from core_support.tiny import (
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
)


def splits(num_layers: int, blocks: int) -> list[list[int]]:
    return [
        [0, *ends, num_layers]
        for ends in itertools.combinations(range(1, num_layers), blocks - 1)
    ]


@given(st.integers(1, 8), st.data())
def test_no_other_split_costs_less(num_layers: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, num_layers))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    costs = rng.random((num_layers + 1, num_layers + 1))
    longest = data.draw(st.integers(-(-num_layers // blocks), num_layers))

    def total(ends: list[int]) -> float:
        return sum(costs[run] for run in itertools.pairwise(ends))

    allowed = [
        ends for ends in splits(num_layers, blocks) if max(np.diff(ends)) <= longest
    ]
    found = best_split(num_layers, blocks, lambda a, b: costs[a, b], longest)
    ends = [0, *np.flatnonzero(np.diff(found)) + 1, num_layers]
    assert len(ends) == blocks + 1
    assert total(ends) == pytest.approx(min(map(total, allowed)))


def test_a_run_is_weighed_once_and_only_if_it_can_come_about() -> None:
    asked: list[tuple[int, int]] = []

    def cost(start: int, end: int) -> float:
        asked.append((start, end))
        return 1.0

    best_split(6, 5, cost, 2)
    assert len(asked) == len(set(asked))
    assert max(end - start for start, end in asked) == 2


@pytest.mark.parametrize("twins", [(0, 1), (2, 3), (3, 4)])
def test_equal_layers_are_put_together(tmp_path: Path, twins: tuple[int, int]) -> None:
    weights = tiny_weights(5)
    first, second = twins
    weights[weight_name(second, "q_proj")] = weights[weight_name(first, "q_proj")]
    model = write_checkpoint(tmp_path / "model", weights, tiny_config(5))
    statistics = write_tiny_statistics(tmp_path / "statistics", model)
    ready = plan(
        model, blocks=PerFamily(None, {"q_proj": 4}), rank=2, statistics=statistics
    )
    layout = search_bands(ready.tensors, ready.layout, statistics)
    bands = layout.bands["q_proj"]
    assert bands[first] == bands[second]
    assert layout.blocks == ready.layout.blocks
    assert layout.bands["k_proj"] == ready.layout.bands["k_proj"]


def lost(ready: object, layout: object, statistics: object) -> float:
    parts = iter_decomposed(ready.tensors, layout, ready.dtype, statistics)
    return sum(p.output_error for p in parts if p.output_error is not None)


def test_the_chosen_bands_lose_no_more_than_equal_ones(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_weights(6), tiny_config(6))
    statistics = write_tiny_statistics(tmp_path / "statistics", model)
    ready = plan(model, blocks=3, rank=2, statistics=statistics)
    seen: list[str] = []
    layout = search_bands(ready.tensors, ready.layout, statistics, seen.append)
    assert len(seen) == 7
    assert layout.ranks == ready.layout.ranks
    assert lost(ready, layout, statistics) <= lost(ready, ready.layout, statistics)
