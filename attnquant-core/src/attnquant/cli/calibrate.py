"""`attnquant calibrate` and `merge-statistics`: what projections are applied to."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnquant.cli.running import (
    OPTIONS,
    add_running_options,
    load,
    progress_bar,
    texts_of,
    windows_of,
)
from attnquant.cli.text import format_duration, format_table
from attnquant.errors import CheckpointError, SettingError
from attnquant.evaluation.runs import observe
from attnquant.sizes import format_bytes
from attnquant.texts import calibration_text
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.statistics import (
    Statistics,
    describe_source,
    merge_statistics,
    open_statistics,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    parser = commands.add_parser(
        "calibrate",
        help="collect calibration statistics of a checkpoint",
        description="Run texts through a checkpoint on MAX, and write the second"
        " moments of what its projections are applied to. The weighted method of"
        " `attnquant decompose` needs them, whatever its settings.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="directory with config.json, safetensors weights and a tokenizer",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="UTF-8 texts (default: five sixths of the topics of Python's reference)",
    )
    _add_output(parser)
    add_running_options(parser)
    parser.set_defaults(run=run)
    merge = commands.add_parser(
        "merge-statistics",
        help="merge statistics of several texts",
        description="Write the statistics of several texts as if they had been"
        " collected in one go. All must be of one checkpoint.",
    )
    merge.add_argument(
        "statistics", type=Path, nargs="+", help="files that `calibrate` wrote"
    )
    _add_output(merge)
    merge.set_defaults(run=run_merge)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file to write"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing file"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(options: argparse.Namespace) -> int:
    """Collect, write, and print a summary."""
    started = time.perf_counter()
    _check_output(options)
    checkpoint = open_checkpoint(options.checkpoint)
    if checkpoint.is_bundle:
        raise CheckpointError(
            str(options.checkpoint),
            expected="a standard checkpoint",
            found="a theta bundle",
            hint="Calibrate on the checkpoint that it was made from.",
        )
    texts = texts_of(options, lambda: [calibration_text()])
    try:
        windows = windows_of(options, options.checkpoint, texts)
    except SettingError as error:
        raise error.renamed(OPTIONS) from error
    source = describe_source(checkpoint)
    model = load(options, options.checkpoint)
    with progress_bar("calibrate", windows) as progress:
        accumulator, used = observe(model, windows, progress)
    accumulator.write(options.out, source, used)
    _show(options, open_statistics(options.out), time.perf_counter() - started)
    return 0


def run_merge(options: argparse.Namespace) -> int:
    """Merge, and print a summary."""
    started = time.perf_counter()
    _check_output(options)
    merge_statistics(
        [open_statistics(path) for path in options.statistics], options.out
    )
    _show(options, open_statistics(options.out), time.perf_counter() - started)
    return 0


def summary(statistics: Statistics, seconds: float) -> dict[str, object]:
    """Return what a statistics file holds, as JSON data."""
    return {
        "statistics": str(statistics.path),
        "checkpoint": statistics.model.name,
        "texts": [
            {"name": text.name, "sha256": text.sha256, "tokens": text.tokens}
            for text in statistics.texts
        ],
        "inputs": len(statistics.tokens),
        "bytes": statistics.path.stat().st_size,
        "seconds": round(seconds, 1),
    }


def describe(statistics: Statistics, seconds: float) -> str:
    """Return the same as a short text with a table."""
    rows: Sequence[Sequence[str]] = [
        (text.name, str(text.tokens), text.sha256[:16]) for text in statistics.texts
    ]
    size = format_bytes(statistics.path.stat().st_size)
    return (
        f"{statistics.path}: second moments of {len(statistics.tokens)} inputs of"
        f" {statistics.model.name}, {size}, in {format_duration(seconds)}\n"
        + format_table(("text", "tokens", "sha256"), rows)
    )


def _show(options: argparse.Namespace, statistics: Statistics, seconds: float) -> None:
    if options.json:
        print(json.dumps(summary(statistics, seconds), indent=2))
    else:
        print(describe(statistics, seconds))


def _check_output(options: argparse.Namespace) -> None:
    """Refuse a place that cannot be written to before minutes are spent.

    Raises:
        SettingError: Naming it.
    """
    out: Path = options.out
    if out.exists() and not (options.overwrite and out.is_file()):
        raise SettingError(
            str(out),
            expected="a file that does not exist yet",
            found="a directory" if out.is_dir() else "an existing one",
            hint="Choose another; --overwrite replaces a file.",
        )
    if not out.parent.is_dir():
        raise SettingError(
            str(out), expected="a file in an existing directory", found="none such"
        )
