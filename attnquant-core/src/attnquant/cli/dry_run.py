"""`attnquant decompose --dry-run`: an estimate as text and as JSON data."""

from __future__ import annotations

import dataclasses

from attnquant.cli.text import format_duration, format_table
from attnquant.sizes import format_bytes
from attnquant.theta.estimate import Estimate
from attnquant.theta.writer import Plan


def summary(plan: Plan, estimate: Estimate) -> dict[str, object]:
    """Return the estimate as JSON data; sizes in bytes, time in seconds."""
    return {
        "checkpoint": str(plan.checkpoint.path),
        "architecture": plan.checkpoint.architecture,
        "num_layers": plan.layout.num_layers,
        "shared_blocks": plan.layout.shared_blocks,
        "lora_rank": plan.layout.lora_rank,
        "tie_families": plan.layout.tie_families,
        "blocks": plan.layout.blocks,
        "ranks": plan.layout.ranks,
        "method": plan.method,
        "dtype": plan.dtype,
        **dataclasses.asdict(estimate),
        "ratio": estimate.source_bytes / estimate.bundle_bytes,
    }


def describe(plan: Plan, estimate: Estimate) -> str:
    """Return the estimate as a short text with a table."""
    layout = plan.layout
    header = ("family", "group", "shape", "bases", "layers", "rank", "now", "then")
    rows = [
        (
            group.family,
            group.group or "-",
            f"{group.shape[0]}x{group.shape[1]}",
            str(group.bases),
            str(group.layers),
            str(group.rank),
            format_bytes(group.source_bytes),
            format_bytes(group.theta_bytes),
        )
        for group in estimate.groups
    ]
    kept = format_bytes(estimate.kept_bytes)
    rows.append(("everything else", "", "", "", "", "", kept, kept))
    ratio = estimate.source_bytes / estimate.bundle_bytes
    return (
        f"{plan.checkpoint.path}: {plan.checkpoint.architecture},"
        f" {layout.num_layers} layers in {layout.shared_blocks} bands, rank"
        f" {layout.lora_rank}, {plan.dtype}, method {plan.method}\n"
        f"{format_table(header, rows)}\n"
        f"{estimate.tensors} tensors, {format_bytes(estimate.source_bytes)} ->"
        f" {format_bytes(estimate.bundle_bytes)} ({ratio:.2f} times smaller)\n"
        f"about {format_bytes(estimate.peak_bytes)} of memory for arrays, and"
        f" {format_duration(estimate.seconds)} of arithmetic on this machine\n"
        "nothing was read but headers, and nothing was written"
    )
