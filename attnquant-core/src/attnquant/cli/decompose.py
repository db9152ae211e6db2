"""`attnquant decompose`: a checkpoint to a theta bundle."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Never

from tqdm import tqdm

from attnquant.cli import dry_run
from attnquant.cli.text import format_bytes, format_table
from attnquant.errors import SettingError
from attnquant.plugins import installed_plugins
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.dtypes import STORAGE_DTYPES
from attnquant.theta.estimate import estimate
from attnquant.theta.families import TIE_MODES
from attnquant.theta.writer import (
    SHARD_BYTES,
    Plan,
    Progress,
    Written,
    plan_decomposition,
    write_bundle,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction


_OPTIONS = {
    "lora_rank": "--rank",
    "shared_blocks": "--blocks",
    "shard_bytes": "--shard-bytes",
}
"""How the user knows a setting."""


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "decompose",
        help="make a theta bundle from a checkpoint",
        description="Replace every tied projection of a checkpoint by a shared base"
        " per band of layers and a low-rank term per layer, and write the result as a"
        " theta bundle.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="directory with config.json and safetensors weights",
    )
    parser.add_argument("--out", type=Path, help="directory to write the bundle to")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be made, and what it would take, reading no weights",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        required=True,
        metavar="G",
        help="number of bands that share a base, from 1 to the number of layers",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="rank of the low-rank terms; needed unless G is the number of layers",
    )
    parser.add_argument(
        "--tie",
        choices=TIE_MODES,
        default="all",
        help="decompose all seven families, or attention only (default: all)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(STORAGE_DTYPES),
        help="storage dtype of bases and factors (default: the checkpoint's)",
    )
    parser.add_argument(
        "--shard-bytes",
        type=int,
        default=SHARD_BYTES,
        metavar="N",
        help=f"size above which the next shard begins (default: {SHARD_BYTES})",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing directory"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Decompose, write, and print a summary; or plan, and print an estimate."""
    if options.out is None and not options.dry_run:
        options.parser.error("the following arguments are required: --out (--dry-run)")
    try:
        plan = _plan(options)
        if options.dry_run:
            figures = estimate(plan, options.shard_bytes)
            data, text = dry_run.summary(plan, figures), dry_run.describe(plan, figures)
        else:
            written = _write(plan, options)
            data, text = summary(written), describe(written)
    except SettingError as error:
        raise error.renamed(_OPTIONS) from error
    print(json.dumps(data, indent=2) if options.json else text)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    checkpoint = open_checkpoint(options.checkpoint)
    supplied = installed_plugins().find(checkpoint.architecture)
    return plan_decomposition(
        checkpoint,
        supplied.prefix_map(checkpoint.config),
        supplied.grouping(checkpoint.text_config),
        shared_blocks=options.blocks,
        lora_rank=options.rank,
        tie_families=options.tie,
        dtype=options.dtype,
    )


def _write(plan: Plan, options: argparse.Namespace) -> Written:
    with tqdm(
        total=0,
        desc="decompose",
        unit="tensor",
        # None: on a terminal only.
        disable=None,
        file=sys.stderr,
    ) as bar:
        return write_bundle(
            plan,
            options.out,
            overwrite=options.overwrite,
            shard_bytes=options.shard_bytes,
            progress=_show_on(bar),
        )


def summary(written: Written) -> dict[str, object]:
    """Return what was written, as JSON data; sizes in bytes."""
    layout = written.info.layout
    return {
        "bundle": str(written.path),
        "method": written.info.method,
        "shared_blocks": layout.shared_blocks,
        "lora_rank": layout.lora_rank,
        "tie_families": layout.tie_families,
        "dtype": written.info.dtype,
        "source_bytes": written.source_bytes,
        "bundle_bytes": written.bundle_bytes,
        "ratio": written.source_bytes / written.bundle_bytes,
        "error": dict(written.info.error),
    }


def describe(written: Written) -> str:
    """Return what was written, as a short text with a table."""
    layout = written.info.layout
    table = format_table(
        ("family", "rank", "relative error"),
        [
            (family, str(layout.ranks[family]), f"{error:.4f}")
            for family, error in written.info.error.items()
        ],
    )
    ratio = written.source_bytes / written.bundle_bytes
    return (
        f"{written.path}: {layout.num_layers} layers in {layout.shared_blocks} bands,"
        f" rank {layout.lora_rank}, {written.info.dtype}\n"
        f"{format_bytes(written.source_bytes)} -> {format_bytes(written.bundle_bytes)}"
        f" ({ratio:.2f} times smaller)\n{table}"
    )


def _show_on(bar: tqdm[Never]) -> Progress:
    def show(what: str, done: int, total: int) -> None:
        bar.total = total
        bar.set_postfix_str(what, refresh=False)
        bar.update(done - bar.n)

    return show
