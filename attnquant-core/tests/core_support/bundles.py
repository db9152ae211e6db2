"""Theta bundles of tiny models, made by the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_support.tiny import write_tiny_checkpoint

if TYPE_CHECKING:
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
