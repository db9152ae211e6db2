"""`attnquant eval`: how far a bundle's predictions are from the original's."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnquant.cli.running import (
    OPTIONS,
    add_running_options,
    load,
    progress_bar,
    texts_of,
    windows_of,
)
from attnquant.cli.text import format_duration, format_table
from attnquant.errors import SettingError
from attnquant.evaluation.measures import Comparison
from attnquant.evaluation.runs import compare
from attnquant.evaluation.windows import Windows
from attnquant.texts import held_out_texts
from attnquant.theta.bundle import parse_block
from attnquant.theta.checkpoint import (
    BUNDLE_KEY,
    Checkpoint,
    open_checkpoint,
    sha256,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction


@dataclass(frozen=True)
class Evaluation:
    """What one run measured.

    Attributes:
        bundle: What was looked at.
        reference: What it was compared with.
        is_source: Whether the bundle was made from the reference, by the hashes of
            its weight files; None where the bundle does not say.
        windows: The texts.
        comparisons: One per text.
        seconds: How long it took.
    """

    bundle: Checkpoint
    reference: Checkpoint
    is_source: bool | None
    windows: Windows
    comparisons: Sequence[Comparison]
    seconds: float


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "eval",
        help="compare a bundle's predictions with the original's",
        description="Run texts through a bundle and through its original on MAX, and"
        " show how far the predictions are apart: perplexities and their ratio, the"
        " Kullback-Leibler divergence, and how often both would say the same. With"
        " --max-ratio it exits with 1 if the bundle is worse than that on some text.",
    )
    parser.add_argument(
        "bundle", type=Path, help="directory of the bundle (or of a checkpoint)"
    )
    parser.add_argument(
        "--reference",
        type=Path,
        required=True,
        metavar="CHECKPOINT",
        help="directory of the original",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="UTF-8 texts (default: a sixth of the topics of Python's reference, and"
        " the Apache licence)",
    )
    parser.add_argument(
        "--max-ratio",
        type=float,
        metavar="X",
        help="exit with 1 if a perplexity is more than X times the original's",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    add_running_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare and print; the exit code tells whether `--max-ratio` was kept."""
    if options.max_ratio is not None and not options.max_ratio > 0:
        raise SettingError(
            "--max-ratio", expected="a positive number", found=str(options.max_ratio)
        )
    found = measure(options)
    if options.json:
        print(json.dumps(summary(found), indent=2))
    else:
        print(describe(found))
    limit = options.max_ratio
    kept = limit is None or all(c.ratio <= limit for c in found.comparisons)
    return 0 if kept else 1


def measure(options: argparse.Namespace) -> Evaluation:
    """Run the texts through both models.

    Raises:
        AttnQuantError: If a model, a text or an option will not do.
    """
    started = time.perf_counter()
    bundle = open_checkpoint(options.bundle)
    reference = open_checkpoint(options.reference)
    texts = texts_of(options, held_out_texts)
    try:
        windows = windows_of(options, options.reference, texts)
    except SettingError as error:
        raise error.renamed(OPTIONS) from error
    original, model = load(options, options.reference), load(options, options.bundle)
    with progress_bar("eval", windows) as progress:
        comparisons = compare(original, model, windows, progress)
    return Evaluation(
        bundle,
        reference,
        _is_source(bundle, reference),
        windows,
        comparisons,
        time.perf_counter() - started,
    )


def _is_source(bundle: Checkpoint, reference: Checkpoint) -> bool | None:
    if not bundle.is_bundle:
        return None
    source = parse_block(bundle.config[BUNDLE_KEY]).source
    hashes = sorted("sha256:" + sha256(shard) for shard in reference.shards)
    return sorted(source.shards.values()) == hashes


def summary(found: Evaluation) -> dict[str, Any]:
    """Return the figures as JSON data; divergences in nats, time in seconds."""
    return {
        "bundle": str(found.bundle.path),
        "reference": str(found.reference.path),
        "reference_is_source": found.is_source,
        "bundle_bytes": _size(found.bundle),
        "reference_bytes": _size(found.reference),
        "window": found.windows.size,
        "texts": [
            {
                "name": tokens.text.name,
                "sha256": tokens.text.sha256,
                **dataclasses.asdict(comparison),
                "ratio": comparison.ratio,
            }
            for tokens, comparison in zip(
                found.windows.texts, found.comparisons, strict=True
            )
        ],
        "seconds": round(found.seconds, 1),
    }


def describe(found: Evaluation) -> str:
    """Return the figures as a short text with a table."""
    header = (
        "text",
        "tokens",
        "original",
        "bundle",
        "ratio",
        "mean KL",
        "max KL",
        "same top-1",
        "max |dlogp|",
    )
    rows = [
        (
            tokens.text.name,
            str(c.tokens),
            f"{c.reference_perplexity:.4g}",
            f"{c.perplexity:.4g}",
            f"{c.ratio:.3f}",
            f"{c.mean_kl:.2g}",
            f"{c.max_kl:.2g}",
            f"{c.top1_agreement:.1%}",
            f"{c.max_log_probability_difference:.2g}",
        )
        for tokens, c in zip(found.windows.texts, found.comparisons, strict=True)
    ]
    notes = {
        None: "",
        True: ", which it was made from",
        False: ", which is NOT what it was made from",
    }
    return (
        f"{found.bundle.path} against {found.reference.path}{notes[found.is_source]}\n"
        f"{format_table(header, rows)}\n"
        "original, bundle: perplexities; KL(original || bundle) and |dlogp| in nats;"
        f" windows of {found.windows.size} tokens; {format_duration(found.seconds)}"
    )


def _size(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint.tensors.infos.values())
