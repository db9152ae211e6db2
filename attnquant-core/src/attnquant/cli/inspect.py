"""`attnquant inspect`: what a theta bundle holds."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attnquant.cli.text import format_table
from attnquant.needs import FORMS, GPU_RANK, ServingNeeds, serving_needs
from attnquant.plugins import installed_plugins
from attnquant.sizes import format_bytes
from attnquant.theta.bundle import Bundle, BundleInfo, open_bundle
from attnquant.theta.dtypes import storage_dtype
from attnquant.theta.names import parse_base, parse_factor

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DIGEST = len("sha256:") + 12
"""How much of a hash is shown to people."""


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "inspect",
        help="check a theta bundle and show what it holds",
        description="Check that a theta bundle is whole, and show how it was made,"
        " how large each family is and how far from the original, what it was made"
        " from, and what it takes to serve it.",
    )
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Open (and so check) the bundle, and print what it says of itself."""
    bundle = open_bundle(options.bundle)
    needs = serving_needs(bundle, installed_plugins())
    if options.json:
        print(json.dumps(summary(bundle, needs), indent=2))
    else:
        print(describe(bundle, needs))
    return 0


def family_bytes(bundle: Bundle) -> dict[str, int]:
    """Return the bytes of bases and factors per family, and of all else as `kept`."""
    sizes = dict.fromkeys([*bundle.info.layout.tied_projections, "kept"], 0)
    for name, tensor in bundle.checkpoint.tensors.infos.items():
        key = parse_base(name) or parse_factor(name)
        sizes[key.family if key else "kept"] += tensor.nbytes
    return sizes


def dense_bytes(bundle: Bundle) -> dict[str, int]:
    """Return what each family's projections would take multiplied out, in its dtype."""
    layout = bundle.info.layout
    sizes = dict.fromkeys(layout.tied_projections, 0)
    itemsize = storage_dtype(bundle.info.dtype).itemsize
    for base, layers in layout.bases.items():
        sizes[base.family] += math.prod(layout.shapes[base]) * len(layers) * itemsize
    return sizes


def summary(bundle: Bundle, needs: ServingNeeds) -> dict[str, object]:
    """Return the block, the architecture, sizes in bytes and needs, as JSON data."""
    sizes = family_bytes(bundle)
    return {
        "bundle": str(bundle.checkpoint.path),
        "architecture": bundle.checkpoint.architecture,
        **bundle.info.to_json(),
        "bytes": {**sizes, "total": sum(sizes.values())},
        "dense_bytes": dense_bytes(bundle),
        "tensors": len(bundle.checkpoint.tensors),
        "serving": {
            "plugin": needs.plugin,
            "reason": needs.reason,
            "weights": {dtype: dict(forms) for dtype, forms in needs.weights.items()},
            "cpu_only_ranks": list(needs.odd_ranks),
        },
    }


def describe(bundle: Bundle, needs: ServingNeeds) -> str:
    """Return a short text: what it is, a table of families, provenance, needs."""
    info, layout = bundle.info, bundle.info.layout
    total = format_bytes(sum(family_bytes(bundle).values()))
    bands = "" if layout.has_equal_bands else "up to "
    rank = "" if layout.has_equal_ranks else "up to "
    path, architecture = bundle.checkpoint.path, bundle.checkpoint.architecture
    head = (
        f"{path}: {architecture}, a theta bundle of {total}\n"
        f"{layout.num_layers} layers in {bands}{layout.shared_blocks} bands, rank"
        f" {rank}{layout.lora_rank}, {info.dtype}, method {info.method}"
    )
    return "\n".join([head, _table(bundle), *_provenance(info), *_needs(needs)])


def _table(bundle: Bundle) -> str:
    info, layout = bundle.info, bundle.info.layout
    sizes, dense = family_bytes(bundle), dense_bytes(bundle)
    rows = [
        (
            family,
            str(layout.blocks[family]) if dense[family] else "-",
            str(layout.ranks[family]),
            format_bytes(sizes[family]),
            f"{sizes[family] / dense[family]:.0%}" if dense[family] else "-",
            _error(info.error, family),
            _error(info.weighted_error, family),
        )
        for family in layout.tied_projections
    ]
    rows.append(("everything else", "", "", format_bytes(sizes["kept"]), "", "", ""))
    header = ("family", "bands", "rank", "size", "of dense", "error", "output error")
    return format_table(header, rows)


def _error(errors: Mapping[str, float], family: str) -> str:
    # A family of which no layer has a base has no error; without statistics, none has
    # an error of outputs.
    return f"{errors[family]:.4f}" if family in errors else "-"


def _provenance(info: BundleInfo) -> Iterator[str]:
    makers = ", ".join(f"{name} {version}" for name, version in info.created_by.items())
    files = ", ".join(
        f"{file} {digest[:_DIGEST]}" for file, digest in info.source.shards.items()
    )
    yield f"made from {info.source.name} ({files}) by {makers}"
    if info.calibration is None:
        yield "with no calibration statistics"
        return
    for text in info.calibration.texts:
        yield (
            f"calibrated on {text['name']}: {text['tokens']} tokens, sha256"
            f" {str(text['sha256'])[:_DIGEST]}"
        )


def _needs(needs: ServingNeeds) -> Iterator[str]:
    if needs.plugin:
        yield f"served by plugin {needs.plugin}"
    else:
        yield f"no loaded plugin supplies {needs.architecture}. {needs.reason}"
    for dtype, forms in needs.weights.items():
        shared, dense = (format_bytes(forms[form]) for form in FORMS)
        yield f"weights in {dtype}: {shared}; served as dense {dense}"
    if needs.odd_ranks:
        ranks = ", ".join(map(str, needs.odd_ranks))
        yield (
            f"ranks that GPUs cannot do, except as dense: {ranks} (they need multiples"
            f" of {GPU_RANK})"
        )
