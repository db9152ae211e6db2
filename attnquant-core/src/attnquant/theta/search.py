"""Bands that are chosen: the contiguous split of each family that loses least.

What a run of layers loses when it shares a base depends on that run alone, so the best
split into G runs is found by dynamic programming over where the last run begins.
Families do not touch one another, and each gets its own split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from attnquant.theta.dtypes import Array
from attnquant.theta.layout import ThetaLayout
from attnquant.theta.names import ProjectionKey, projection_name
from attnquant.theta.statistics import InputKey, Statistics, input_of
from attnquant.theta.weighted import output_energy, shared_error, with_ridge

Cost = Callable[[int, int], float]
"""What the layers from the first number up to, not including, the second lose."""

Progress = Callable[[str], None]
"""Called with each family that has been searched."""

_LONGEST = 2
"""How many times longer than the mean a run may be."""


def search_bands(
    state_dict: Mapping[str, Array],
    layout: ThetaLayout,
    statistics: Statistics,
    progress: Progress | None = None,
) -> ThetaLayout:
    """Return the layout with the bands that lose least at its G and r of each family.

    Args:
        state_dict: Canonical names to ``[out, in]`` arrays; it may read lazily.
        layout: How many bands there are of each family, and of which rank.
        statistics: Moments that errors are measured by; those of one layer count
            relative to the energy of its outputs.
        progress: Called as work goes on.

    Raises:
        CheckpointError: If the statistics lack a moment, or one is damaged.
    """
    statistics.check_shapes(
        {
            ProjectionKey(layer, base.family): layout.shapes[base]
            for base, layers in layout.bases.items()
            for layer in layers
            if layout.ranks[base.family]
        }
    )
    chosen = {}
    for family, blocks in layout.blocks.items():
        if layout.ranks[family]:
            cost = _family_cost(state_dict, layout, statistics, family)
            longest = min(
                _LONGEST * math.ceil(layout.num_layers / blocks),
                layout.num_layers - blocks + 1,
            )
            chosen[family] = best_split(layout.num_layers, blocks, cost, longest)
        if progress:
            progress(family)
    return layout.with_bands(chosen)


def best_split(num_layers: int, blocks: int, cost: Cost, longest: int) -> list[int]:
    """Return the band of each layer in the contiguous split of smallest total cost.

    Args:
        num_layers: L.
        blocks: G, from 1 to L.
        cost: What a run loses; asked once for each run that may come about.
        longest: The most layers of a run; at least ``L / G``.
    """
    # For each number of layers that are split already, the loss and where runs begin.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    known: dict[tuple[int, int], float] = {}
    for left in range(blocks - 1, -1, -1):
        found: dict[int, tuple[float, list[int]]] = {}
        for start, (loss, starts) in best.items():
            for end in range(start + 1, min(start + longest, num_layers) + 1):
                if not left <= num_layers - end <= left * longest:
                    continue
                if (start, end) not in known:
                    known[start, end] = cost(start, end)
                total = loss + known[start, end]
                if end not in found or total < found[end][0]:
                    found[end] = total, [*starts, start]
        best = found
    _, starts = best[num_layers]
    return [sum(start <= layer for start in starts) - 1 for layer in range(num_layers)]


def _family_cost(
    state_dict: Mapping[str, Array],
    layout: ThetaLayout,
    statistics: Statistics,
    family: str,
) -> Cost:
    def cost(start: int, end: int) -> float:
        groups: dict[str, list[int]] = {}
        for layer in range(start, end):
            if (base := layout.base_of(layer, family)) is not None:
                groups.setdefault(base.group, []).append(layer)
        return sum(
            _loss(state_dict, layers, statistics, family, layout.ranks[family])
            for layers in groups.values()
            if len(layers) > 1
        )

    return cost


def _loss(
    state_dict: Mapping[str, Array],
    layers: Sequence[int],
    statistics: Statistics,
    family: str,
    rank: int,
) -> float:
    matrices = [
        state_dict[projection_name(layer, family)].astype("float32") for layer in layers
    ]
    moments = [statistics.moment(InputKey(layer, input_of(family))) for layer in layers]
    energy = sum(
        output_energy(matrix, moment)
        for matrix, moment in zip(matrices, moments, strict=True)
    ) / len(layers)
    regular = [with_ridge(moment) for moment in moments]
    rank = min(rank, *matrices[0].shape)
    return shared_error(matrices, regular, rank) / energy if energy else 0.0
