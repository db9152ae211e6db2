"""Ranks from a budget: bytes go where they take most from the error.

What one rank more takes from the error of a base is known beforehand, from spectra
(`plain_gains`, `weighted_gains`), and it falls from rank to rank. So steps of all bases
are taken in the order of what they gain per byte, as long as they fit.

Errors of different bases are made comparable by what they are relative to: the mean,
over the layers of the base, of the energy of the outputs (with statistics) or of the
weights. Otherwise one family with large activations would take the whole budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from attnquant.errors import SettingError
from attnquant.theta.decompose import kept_names, read_matrices
from attnquant.theta.dtypes import storage_dtype, widen
from attnquant.theta.layout import ThetaLayout
from attnquant.theta.lowrank import Float64, plain_gains
from attnquant.theta.names import BaseKey, base_name
from attnquant.theta.statistics import InputKey, input_of
from attnquant.theta.weighted import output_energy, weighted_gains, with_ridge
from attnquant.theta.writer import Plan

RANK_STEP = 8
"""Ranks are multiples of this, which GPUs need, or the full rank."""

Progress = Callable[[str], None]
"""Called with the name of each base whose spectra are known."""


class Curve(NamedTuple):
    """What the ranks of one base gain and cost.

    Attributes:
        gains: What each rank takes from the error, falling, up to the full rank.
        cost: Bytes of one rank, of all layers' factors.
    """

    gains: Float64
    cost: int


def spread_budget(plan: Plan, budget: int, progress: Progress | None = None) -> Plan:
    """Return the plan with the ranks that lose least within a budget.

    Args:
        plan: From `plan_decomposition`, at any rank.
        budget: The most bytes that the bundle's tensors may take.
        progress: Called as work goes on: weights and moments of one base are read at a
            time.

    Raises:
        SettingError: If no base is shared, the budget does not even hold the bases, or
            it is more than the full ranks take.
        CheckpointError: If a projection is not floating-point or not finite, or a
            moment is damaged.
    """
    layout = plan.layout
    shared = [base for base, layers in layout.bases.items() if len(layers) > 1]
    if not shared:
        raise SettingError(
            "budget",
            expected="nothing, since no base is shared and so no rank is to be chosen",
            found=f"{budget} bytes",
        )
    bare = layout.with_ranks(dict.fromkeys(layout.bases, 0))
    full = {base: min(shape) for base, shape in layout.shapes.items()}
    lowest = _bundle_bytes(plan, bare)
    highest = _bundle_bytes(plan, layout.with_ranks(full))
    if not lowest <= budget <= highest:
        raise SettingError(
            "budget",
            expected=f"from {lowest} bytes, which the bundle takes at rank 0, to"
            f" {highest}, which it takes at full rank",
            found=f"{budget} bytes",
        )
    curves = {}
    for base in shared:
        curves[base] = _curve(plan, base)
        if progress:
            progress(base_name(*base))
    ranks = choose_ranks(curves, budget - lowest)
    return dataclasses.replace(plan, layout=bare.with_ranks({**full, **ranks}))


def choose_ranks(curves: Mapping[BaseKey, Curve], room: int) -> dict[BaseKey, int]:
    """Return the rank of each base, so that what is gained by the bytes is most.

    A step that does not fit is passed over, and so are the later ones of its base. More
    room never gains less: a step that was passed over gains more than whatever could
    take the smaller room that was left for it.

    Args:
        curves: What ranks gain and cost.
        room: The most bytes that all factors may take.
    """
    steps = []
    for order, (base, (gains, cost)) in enumerate(curves.items()):
        worth = math.inf
        for start in range(0, len(gains), RANK_STEP):
            part = gains[start : start + RANK_STEP]
            # Never above the step before it, not even by rounding.
            worth = min(worth, float(part.mean()) / cost)
            if worth > 0:
                steps.append((-worth, order, start + len(part), len(part) * cost, base))
    ranks = dict.fromkeys(curves, 0)
    passed: set[BaseKey] = set()
    for _, _, rank, size, base in sorted(steps):
        if base in passed:
            continue
        if size > room:
            passed.add(base)
        else:
            ranks[base] = rank
            room -= size
    return ranks


def _curve(plan: Plan, base: BaseKey) -> Curve:
    layers, (out_dim, in_dim) = plan.layout.bases[base], plan.layout.shapes[base]
    matrices = [widen(w) for w in read_matrices(plan.tensors, plan.layout, base)]
    if plan.statistics is None:
        gains = plain_gains(matrices)
        energy = sum(float(np.square(w, dtype=np.float64).sum()) for w in matrices)
    else:
        source = input_of(base.family)
        moments = [plan.statistics.moment(InputKey(layer, source)) for layer in layers]
        energy = sum(map(output_energy, matrices, moments))
        gains = weighted_gains(matrices, [with_ridge(moment) for moment in moments])
    itemsize = storage_dtype(plan.dtype).itemsize
    return Curve(
        # Without energy there is nothing to lose.
        gains * (len(layers) / energy) if energy else np.zeros_like(gains),
        len(layers) * (out_dim + 1 + in_dim) * itemsize,
    )


def _bundle_bytes(plan: Plan, layout: ThetaLayout) -> int:
    infos = plan.tensors.infos
    theta = sum(math.prod(shape) for shape in layout.tensors().values())
    kept = sum(infos[name].nbytes for name in kept_names(infos, layout))
    return theta * storage_dtype(plan.dtype).itemsize + kept
