"""Theta bundles of tiny models, made by the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_support.tiny import write_tiny_checkpoint

if TYPE_CHECKING:
    from attnquant.theta.statistics import Statistics
    from attnquant.theta.writer import Plan, Written


def plan(checkpoint: Path, blocks: object = 2, rank: object = 3, **more: Any) -> Plan:
    """Plan the decomposition of a tiny checkpoint."""
    from attnquant.theta.checkpoint import open_checkpoint
    from attnquant.theta.grouping import uniform
    from attnquant.theta.prefix_map import PrefixMap
    from attnquant.theta.writer import plan_decomposition

    more.setdefault("prefix_map", PrefixMap({"model.": "", "lm_head.": "lm_head."}))
    more.setdefault("grouping", uniform)
    return plan_decomposition(
        open_checkpoint(checkpoint), shared_blocks=blocks, lora_rank=rank, **more
    )


def write_tiny_bundle(folder: Path, num_layers: int = 4, **options: Any) -> Written:
    """Write ``model`` and from it ``bundle`` into a folder."""
    from attnquant.theta.writer import write_bundle

    if not (folder / "model").exists():
        write_tiny_checkpoint(folder / "model", num_layers)
    return write_bundle(plan(folder / "model", **options), folder / "bundle")


def write_tiny_statistics(
    path: Path, checkpoint: Path, *, tokens: int = 50, seed: int = 0
) -> Statistics:
    """Write statistics of a checkpoint, of random inputs; no model is run.

    Args:
        path: The file to write.
        checkpoint: A tiny checkpoint.
        tokens: How many inputs; fewer than dimensions give singular moments.
        seed: Seed of the inputs.
    """
    import numpy as np

    from attnquant.theta.checkpoint import open_checkpoint
    from attnquant.theta.names import parse_projection
    from attnquant.theta.statistics import (
        Accumulator,
        CalibrationText,
        InputKey,
        describe_source,
        input_of,
        open_statistics,
    )

    source = open_checkpoint(checkpoint)
    sizes = {
        InputKey(key.layer, input_of(key.family)): info.shape[1]
        for name, info in source.tensors.infos.items()
        if (key := parse_projection(name.removeprefix("model.")))
    }
    rng = np.random.default_rng(seed)
    accumulator = Accumulator()
    for key in sorted(sizes):
        # Directions differ in strength, as those of real inputs do.
        mixing = rng.normal(size=(sizes[key], sizes[key])) * np.geomspace(
            2, 0.1, sizes[key]
        )
        accumulator.add(key, rng.normal(size=(tokens, sizes[key])) @ mixing)
    text = CalibrationText("noise", "00" * 32, tokens)
    accumulator.write(path, describe_source(source), [text])
    return open_statistics(path)
