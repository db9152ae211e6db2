"""`attnquant decompose`: a checkpoint to a theta bundle."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Never

from tqdm import tqdm

from attnquant.cli import dry_run
from attnquant.cli.text import format_duration, format_table
from attnquant.errors import SettingError
from attnquant.plugins import installed_plugins
from attnquant.sizes import format_bytes, parse_bytes
from attnquant.theta.budget import RANK_STEP, spread_budget
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.decompose import MEAN_SVD, METHODS, WEIGHTED
from attnquant.theta.dtypes import STORAGE_DTYPES
from attnquant.theta.estimate import estimate
from attnquant.theta.families import TIE_MODES, PerFamily, parse_per_family
from attnquant.theta.layout import ThetaLayout
from attnquant.theta.names import base_name
from attnquant.theta.search import search_bands
from attnquant.theta.statistics import open_statistics
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


_BANDS = ("equal", "auto")

_OPTIONS = {
    "lora_rank": "--rank",
    "budget": "--budget",
    "shared_blocks": "--blocks",
    "shard_bytes": "--shard-size",
    "jobs": "--jobs",
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
        "--statistics",
        type=Path,
        metavar="FILE",
        help="what `attnquant calibrate` wrote for this checkpoint; needed for the"
        " method weighted",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        help="weighted makes the error of the projections' outputs small, mean-svd that"
        " of their weights, which keeps no model below passthrough (default: weighted"
        " with --statistics, mean-svd without)",
    )
    parser.add_argument(
        "--blocks",
        type=_per_family,
        required=True,
        metavar="G",
        help="number of bands that share a base, from 1 to the number of layers; or by"
        " family, as in q_proj=9,v_proj=18: a family that is not named has a base per"
        " layer, unless a number for the others stands with it, as in 12,q_proj=9",
    )
    parser.add_argument(
        "--bands",
        choices=_BANDS,
        default=_BANDS[0],
        help="cut the layers into runs of equal length, or search for each family the"
        " runs that lose least, which needs --statistics and takes several times as"
        " long (default: equal)",
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--rank",
        type=_per_family,
        metavar="R",
        help="rank of the low-rank terms; or by family, as in 32,q_proj=64; needed"
        " where bases are shared, unless there is a budget",
    )
    ranks.add_argument(
        "--budget",
        type=_size,
        metavar="SIZE",
        help="the most that the bundle's weights may take, such as 300MB: a rank, in"
        f" steps of {RANK_STEP}, is chosen for each base, so that the error is least",
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
        "--shard-size",
        type=_size,
        default=SHARD_BYTES,
        metavar="SIZE",
        help="size above which the next weight file begins, such as 500MB (default:"
        f" {format_bytes(SHARD_BYTES)})",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="work on N bases at a time, each with its own memory (default: 1)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing directory"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Decompose, write, and print a summary; or plan, and print an estimate."""
    if options.method == WEIGHTED and options.statistics is None:
        raise SettingError(
            "--statistics",
            expected="a file of statistics, which the method weighted fits to",
            found="nothing",
            hint="`attnquant calibrate` makes one; --method mean-svd needs none.",
        )
    if options.method == MEAN_SVD and options.statistics is not None:
        raise SettingError(
            "--statistics",
            expected="nothing, since the method mean-svd uses none",
            found=str(options.statistics),
        )
    if options.bands == "auto" and (options.statistics is None or options.dry_run):
        raise SettingError(
            "--bands",
            expected="equal, since a search reads weights and statistics",
            found="auto" + (" with --dry-run" if options.dry_run else ""),
        )
    if options.budget is not None and options.dry_run:
        raise SettingError(
            "--budget",
            expected="--rank, since spreading a budget reads weights",
            found="--budget with --dry-run",
        )
    if options.out is None and not options.dry_run:
        options.parser.error("the following arguments are required: --out (--dry-run)")
    try:
        plan = _plan(options)
        if options.dry_run:
            figures = estimate(plan)
            data, text = dry_run.summary(plan, figures), dry_run.describe(plan, figures)
        else:
            written = _write(plan, options)
            data, text = summary(written), describe(written)
    except SettingError as error:
        raise error.renamed(_OPTIONS) from error
    except KeyboardInterrupt:
        print(
            "attnquant: interrupted; the same command goes on from here",
            file=sys.stderr,
        )
        return 130
    print(json.dumps(data, indent=2) if options.json else text)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    checkpoint = open_checkpoint(options.checkpoint)
    supplied = installed_plugins().find(checkpoint.architecture)
    plan = plan_decomposition(
        checkpoint,
        supplied.prefix_map(checkpoint.config),
        supplied.grouping(checkpoint.text_config),
        shared_blocks=options.blocks,
        # With a budget any rank will do: others take its place.
        lora_rank=options.rank if options.budget is None else 1,
        tie_families=options.tie,
        dtype=options.dtype,
        statistics=options.statistics and open_statistics(options.statistics),
    )
    if options.budget is not None:
        plan = _spread(plan, options.budget)
    if options.bands == "auto" and plan.statistics is not None:
        with _bar("search bands", "family", len(plan.layout.blocks)) as bar:

            def show(family: str) -> None:
                bar.set_postfix_str(family, refresh=False)
                bar.update()

            layout = search_bands(plan.tensors, plan.layout, plan.statistics, show)
        plan = dataclasses.replace(plan, layout=layout)
        if options.budget is not None:
            plan = _spread(plan, options.budget)
    return plan


def _spread(plan: Plan, budget: int) -> Plan:
    with _bar("spread budget", "base", len(plan.layout.bases)) as bar:

        def show(base: str) -> None:
            bar.set_postfix_str(base, refresh=False)
            bar.update()

        return spread_budget(plan, budget, show)


def _bar(what: str, unit: str, total: int) -> tqdm[Never]:
    # Disabled by None: shown on a terminal only.
    return tqdm(total=total, desc=what, unit=unit, disable=None, file=sys.stderr)


def _write(plan: Plan, options: argparse.Namespace) -> Written:
    with _bar("decompose", "tensor", 0) as bar:
        return write_bundle(
            plan,
            options.out,
            overwrite=options.overwrite,
            shard_bytes=options.shard_size,
            jobs=options.jobs,
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
        "blocks": layout.blocks,
        "ranks": layout.ranks,
        "base_ranks": {base_name(*b): rank for b, rank in layout.base_ranks.items()},
        "error": dict(written.info.error),
        "weighted_error": dict(written.info.weighted_error),
        "seconds": written.seconds,
    }


def describe(written: Written) -> str:
    """Return what was written, as a short text with a table."""
    info, layout = written.info, written.info.layout
    table = format_table(
        ("family", "bands", "rank", "error of weights", "of outputs"),
        [
            (
                family,
                str(layout.blocks[family]),
                _ranks(layout, family),
                f"{error:.4f}",
                f"{info.weighted_error[family]:.4f}"
                if family in info.weighted_error
                else "-",
            )
            for family, error in info.error.items()
        ],
    )
    ratio = written.source_bytes / written.bundle_bytes
    return (
        f"{written.path}: {layout.num_layers} layers in {layout.shared_blocks} bands,"
        f" rank {layout.lora_rank}, {info.dtype}, method {info.method}\n"
        f"{format_bytes(written.source_bytes)} -> {format_bytes(written.bundle_bytes)}"
        f" ({ratio:.2f} times smaller) in {format_duration(written.seconds)}\n{table}"
    )


def _ranks(layout: ThetaLayout, family: str) -> str:
    """Return the rank of a family's factors, or the span of its ranks."""
    shared = [
        layout.rank_of(base)
        for base, layers in layout.bases.items()
        if base.family == family and len(layers) > 1
    ] or [0]
    low, high = min(shared), max(shared)
    return str(high) if low == high else f"{low} to {high}"


def _per_family(text: str) -> PerFamily:
    try:
        return parse_per_family(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number nor numbers by family, as in"
            " 32,q_proj=64"
        ) from None


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size, such as 500MB"
        ) from None


def _show_on(bar: tqdm[Never]) -> Progress:
    def show(what: str, done: int, total: int) -> None:
        bar.total = total
        bar.set_postfix_str(what, refresh=False)
        bar.update(done - bar.n)

    return show
