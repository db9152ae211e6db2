"""What a decomposition will take, from shapes alone: bytes, memory and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnquant.theta.decompose import kept_names
from attnquant.theta.dtypes import storage_dtype
from attnquant.theta.lowrank import is_sampled, sample_width
from attnquant.theta.names import BaseKey, projection_name
from attnquant.theta.weighted import SWEEPS
from attnquant.theta.writer import Plan

_PLAIN_BYTES = 48
"""Bytes per matrix entry that the plain method needs beside the band's matrices: base
and residual in float32 and float64, the low-rank term, the difference, its square."""

_GRAM_BYTES = 5 * 8
"""Bytes per entry of a Gram matrix: itself, its eigenvectors and LAPACK's room."""

_WEIGHTED_BYTES = 6 * 8
"""Bytes per matrix entry of the weighted method's blocks: the difference, its products
with moment and factor, the base and what it is pulled by."""

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
        peak_bytes: The most memory for arrays at a time, if one base is worked on.
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


def estimate(plan: Plan) -> Estimate:
    """Estimate a planned decomposition, reading no weights.

    Args:
        plan: From `plan_decomposition`.
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
        peak_bytes=max(_peak(plan, base) for base in layout.bases),
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


def _peak(plan: Plan, base: BaseKey) -> int:
    layout = plan.layout
    (out_dim, in_dim), layers = layout.shapes[base], len(layout.bases[base])
    entries, short = out_dim * in_dim, min(out_dim, in_dim)
    source = _source_bytes(plan, base)
    if not layout.rank_of(base):
        return source
    if plan.statistics is None:
        return source + entries * _PLAIN_BYTES + short * short * _GRAM_BYTES
    # Each layer in float64, its moment in float32 and float64; their sum, factorised,
    # and of more than two layers what is left of it without each, factorised too.
    turns = 8 * layers if layers > 2 else 0  # noqa: PLR2004
    moments = in_dim * in_dim * (12 * layers + turns + 16)
    own = entries * (8 * layers + _WEIGHTED_BYTES)
    return source + own + moments + short * short * _GRAM_BYTES


def _seconds(plan: Plan) -> float:
    """Estimate the time of all fits, at two rates measured on moderate matrices.

    They are products (in float64; one in float32 counts half) and the eigenvectors of a
    ``[k, k]`` matrix, which are cubic in k.
    """
    layout = plan.layout
    products = cubes = 0.0
    for base, shape in layout.shapes.items():
        if rank := layout.rank_of(base):
            layers = len(layout.bases[base])
            fit = _plain_work if plan.statistics is None else _weighted_work
            flops, cubic = fit(shape, rank, layers)
            products, cubes = products + flops, cubes + cubic
    if not products:
        return 0.0
    side = np.random.default_rng(0).normal(size=(_TRIAL_SIZE, _TRIAL_SIZE))
    product = _fastest(lambda: side @ side) / (2.0 * _TRIAL_SIZE**3)
    gram = side @ side.T
    eigen = _fastest(lambda: np.linalg.eigh(gram)) / float(_TRIAL_SIZE) ** 3
    return products * product + cubes * eigen


def _plain_work(shape: tuple[int, int], rank: int, layers: int) -> tuple[float, float]:
    entries, short = float(shape[0] * shape[1]), min(shape)
    if is_sampled(rank, shape):
        width = sample_width(rank)
        # Eight products with the sample in float32, and W_eff for the error.
        return layers * entries * (8.0 * width + 2 * rank), layers * float(width) ** 3
    return layers * 2.0 * entries * (short + 2 * rank), layers * float(short) ** 3


def _weighted_work(
    shape: tuple[int, int], rank: int, layers: int
) -> tuple[float, float]:
    out_dim, in_dim = float(shape[0]), float(shape[1])
    short, entries = min(out_dim, in_dim), out_dim * in_dim
    # Two products in float32 per layer for the errors.
    errors = layers * 2.0 * entries * in_dim
    if layers == 2:  # noqa: PLR2004 (solved outright)
        # The base, and in full what directions are found by.
        block = 4.0 * entries * (in_dim + short)
        return in_dim**3 / 3 + block + errors, short**3
    turns = SWEEPS * layers
    turn = entries * (8.0 * in_dim + 4 * rank)
    factors = (layers + 1) * in_dim**3 / 3
    return factors + turns * turn + errors, turns * short**3


def _fastest(run: Callable[[], object], rounds: int = 2) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
