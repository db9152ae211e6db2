"""What a decomposition will take, from shapes alone: bytes, memory and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnquant.theta.decompose import kept_names
from attnquant.theta.dtypes import storage_dtype
from attnquant.theta.names import BaseKey, projection_name
from attnquant.theta.writer import Plan

_WORKING_BYTES = 48
"""Bytes per matrix entry that decomposing one matrix needs beside its band: base and
residual in float32 and float64, the low-rank term, the difference and its square."""

_GRAM_BYTES = 5 * 8
"""Bytes per entry of a Gram matrix: itself, its eigenvectors and LAPACK's room."""

_TRIAL_SIZE = 768
"""Side of the matrices with which this machine's speed is tried out."""


@dataclass(frozen=True)
class GroupEstimate:
    """All bases of one family and W0 group.

    Attributes:
        family: The family.
        group: The group's name; empty in a uniform model.
        shape: ``(out, in)`` of each matrix.
        bases: How many bases there are.
        layers: How many layers they serve.
        rank: The largest rank of the factors.
        source_bytes: What these matrices take in the checkpoint.
        theta_bytes: What bases and factors will take.
    """

    family: str
    group: str
    shape: tuple[int, int]
    bases: int
    layers: int
    rank: int
    source_bytes: int
    theta_bytes: int


@dataclass(frozen=True)
class Estimate:
    """A decomposition's figures before it is run.

    Attributes:
        groups: One entry per family and W0 group.
        tensors: How many tensors the bundle will hold.
        kept_bytes: What stays as it is.
        source_bytes: What the checkpoint's tensors take, ignored ones left out.
        bundle_bytes: What the bundle's will take.
        peak_bytes: The most memory for arrays at a time, the shard being filled
            included.
        seconds: Time for the arithmetic on this machine, reading and writing left
            out; from two short trials.
    """

    groups: tuple[GroupEstimate, ...]
    tensors: int
    kept_bytes: int
    source_bytes: int
    bundle_bytes: int
    peak_bytes: int
    seconds: float


def estimate(plan: Plan, shard_bytes: int) -> Estimate:
    """Estimate a planned decomposition, reading no weights.

    Args:
        plan: From `plan_decomposition`.
        shard_bytes: Size above which the next shard begins.
    """
    layout, infos = plan.layout, plan.tensors.infos
    itemsize = storage_dtype(plan.dtype).itemsize
    kept = kept_names(infos, layout)
    kept_bytes = sum(infos[name].nbytes for name in kept)
    keys = dict.fromkeys((base.family, base.group) for base in layout.bases)
    groups = tuple(_group(plan, family, group, itemsize) for family, group in keys)
    theta_bytes = sum(group.theta_bytes for group in groups)
    return Estimate(
        groups=groups,
        tensors=len(layout.tensors()) + len(kept),
        kept_bytes=kept_bytes,
        source_bytes=sum(info.nbytes for info in infos.values()),
        bundle_bytes=theta_bytes + kept_bytes,
        peak_bytes=_peak(plan, min(shard_bytes, theta_bytes + kept_bytes)),
        seconds=_seconds(plan),
    )


def _group(plan: Plan, family: str, group: str, itemsize: int) -> GroupEstimate:
    layout = plan.layout
    bases = [b for b in layout.bases if (b.family, b.group) == (family, group)]
    sizes = [
        int(np.prod(shape, dtype=np.int64))
        for base in bases
        for _, shape in layout.base_tensors(base)
    ]
    return GroupEstimate(
        family=family,
        group=group,
        shape=layout.shapes[bases[0]],
        bases=len(bases),
        layers=sum(len(layout.bases[base]) for base in bases),
        rank=max(layout.rank_of(base) for base in bases),
        source_bytes=sum(_source_bytes(plan, base) for base in bases),
        theta_bytes=sum(sizes) * itemsize,
    )


def _source_bytes(plan: Plan, base: BaseKey) -> int:
    names = (projection_name(i, base.family) for i in plan.layout.bases[base])
    return sum(plan.tensors.infos[name].nbytes for name in names)


def _peak(plan: Plan, pending: int) -> int:
    layout = plan.layout
    needs = [0]
    for base, shape in layout.shapes.items():
        entries, short = shape[0] * shape[1], min(shape)
        working = entries * _WORKING_BYTES + short * short * _GRAM_BYTES
        needs.append(
            _source_bytes(plan, base) + (working if layout.rank_of(base) else 0)
        )
    # A shard is kept until it is full; the last tensor may come on top of it.
    return max(needs) + pending


def _seconds(plan: Plan) -> float:
    """Estimate the time of all truncated SVDs.

    One of an ``[out, in]`` matrix with short side k multiplies about
    ``2·out·in·k + 4·out·in·r`` times and finds the eigenvectors of a ``[k, k]`` matrix,
    which is cubic in k. Both rates are measured on a matrix of moderate size.
    """
    layout = plan.layout
    flops = cubes = 0.0
    for base, (out_dim, in_dim) in layout.shapes.items():
        if rank := layout.rank_of(base):
            matrices, short = len(layout.bases[base]), min(out_dim, in_dim)
            flops += matrices * 2.0 * out_dim * in_dim * (short + 2 * rank)
            cubes += matrices * float(short) ** 3
    if not flops:
        return 0.0
    side = np.random.default_rng(0).normal(size=(_TRIAL_SIZE, _TRIAL_SIZE))
    product = _fastest(lambda: side @ side) / (2.0 * _TRIAL_SIZE**3)
    gram = side @ side.T
    eigen = _fastest(lambda: np.linalg.eigh(gram)) / float(_TRIAL_SIZE) ** 3
    return flops * product + cubes * eigen


def _fastest(run: Callable[[], object], rounds: int = 2) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
