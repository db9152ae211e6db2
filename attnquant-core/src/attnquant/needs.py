"""What it takes to serve a bundle: a plugin, memory, and ranks that a GPU can do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attnquant.plugins import PluginSet
from attnquant.theta.bundle import Bundle
from attnquant.theta.dtypes import STORAGE_DTYPES

GPU_RANK = 8
"""MAX's matmuls for GPUs do not compile for every inner dimension: not for 4."""

FORMS = ("shared", "dense")
"""Weights with each base once, or with every projection multiplied out."""


@dataclass(frozen=True)
class ServingNeeds:
    """What it takes to serve a bundle.

    Attributes:
        architecture: Which architecture must be supplied.
        plugin: ``name (distribution version)`` of the plugin that does; None without.
        reason: Why there is none, and what to do; empty if there is one.
        weights: Dtype to form (see `FORMS`) to the bytes that weights take there.
            The KV cache comes on top, by the length of sequences.
        odd_ranks: Ranks that only a CPU, or the `dense` formulation, can do.
    """

    architecture: str
    plugin: str | None
    reason: str
    weights: Mapping[str, Mapping[str, int]]
    odd_ranks: tuple[int, ...]


def serving_needs(bundle: Bundle, plugins: PluginSet) -> ServingNeeds:
    """Work out what serving a bundle takes, reading no tensor.

    Args:
        bundle: An open bundle.
        plugins: The plugins that are installed.
    """
    architecture = bundle.checkpoint.architecture
    supplied = plugins.supplied.get(architecture)
    plugin = None
    if supplied is not None:
        found = supplied.plugin
        plugin = f"{found.name} ({found.distribution} {found.version})"
    entries = dict(zip(FORMS, _entries(bundle), strict=True))
    layout = bundle.info.layout
    ranks = {layout.rank_of(base) for base in layout.bases}
    return ServingNeeds(
        architecture=architecture,
        plugin=plugin,
        reason="" if plugin else plugins.explain(),
        weights={
            name: {form: count * dtype.itemsize for form, count in entries.items()}
            for name, dtype in STORAGE_DTYPES.items()
        },
        odd_ranks=tuple(sorted(rank for rank in ranks if rank % GPU_RANK)),
    )


def _entries(bundle: Bundle) -> tuple[int, int]:
    """Count the numbers in all tensors, as stored and with projections multiplied out.

    Of a tied head there is no copy: the graph shares the embedding.
    """
    layout = bundle.info.layout
    theta = sum(math.prod(shape) for shape in layout.tensors().values())
    kept = sum(math.prod(shape) for _, shape in bundle.info.kept.values())
    dense = sum(
        math.prod(layout.shapes[base]) * len(layers)
        for base, layers in layout.bases.items()
    )
    return theta + kept, dense + kept
