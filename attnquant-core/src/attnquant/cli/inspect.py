"""`attnquant inspect`: what a theta bundle holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from attnquant.cli.text import format_bytes, format_table
from attnquant.theta.bundle import Bundle, open_bundle
from attnquant.theta.names import parse_base, parse_factor

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "inspect",
        help="check a theta bundle and show what it holds",
        description="Check that a theta bundle is whole, and show how it was made,"
        " how large each family is and how far it is from the original.",
    )
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Open (and so check) the bundle, and print what it says of itself."""
    bundle = open_bundle(options.bundle)
    if options.json:
        print(json.dumps(summary(bundle), indent=2))
    else:
        print(describe(bundle))
    return 0


def family_bytes(bundle: Bundle) -> dict[str, int]:
    """Return the bytes of bases and factors per family, and of all else as `kept`."""
    sizes = dict.fromkeys([*bundle.info.layout.tied_projections, "kept"], 0)
    for name, tensor in bundle.checkpoint.tensors.infos.items():
        key = parse_base(name) or parse_factor(name)
        sizes[key.family if key else "kept"] += tensor.nbytes
    return sizes


def summary(bundle: Bundle) -> dict[str, object]:
    """Return the block, the architecture and sizes in bytes, as JSON data."""
    sizes = family_bytes(bundle)
    return {
        "bundle": str(bundle.checkpoint.path),
        "architecture": bundle.checkpoint.architecture,
        **bundle.info.to_json(),
        "bytes": {**sizes, "total": sum(sizes.values())},
        "tensors": len(bundle.checkpoint.tensors),
    }


def describe(bundle: Bundle) -> str:
    """Return a short text with a table."""
    info, layout = bundle.info, bundle.info.layout
    sizes = family_bytes(bundle)
    rows = [
        (
            family,
            str(layout.ranks[family]),
            format_bytes(sizes[family]),
            # A family of which no layer has a base has no error either.
            f"{info.error[family]:.4f}" if family in info.error else "-",
        )
        for family in layout.tied_projections
    ]
    rows.append(("everything else", "", format_bytes(sizes["kept"]), ""))
    table = format_table(("family", "rank", "size", "relative error"), rows)
    return (
        f"{bundle.checkpoint.path}: {bundle.checkpoint.architecture}, a theta bundle"
        f" of {format_bytes(sum(sizes.values()))}\n"
        f"{layout.num_layers} layers in {layout.shared_blocks} bands, rank"
        f" {layout.lora_rank}, {info.dtype}, method {info.method}, made from"
        f" {info.source.name}\n{table}"
    )
