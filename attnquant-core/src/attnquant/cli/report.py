"""`attnquant report`: bundles as a page of pictures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Never

from tqdm import tqdm

from attnquant.errors import CheckpointError, ServingError, SettingError
from attnquant.plugins import installed_plugins
from attnquant.report.anatomy import Anatomy, Progress, examine
from attnquant.report.evaluations import EvaluationFigures, read_evaluation
from attnquant.sizes import format_bytes
from attnquant.theta.bundle import Bundle, open_bundle
from attnquant.theta.checkpoint import Checkpoint, RenamedTensors, open_checkpoint
from attnquant.theta.directory import check_target, whole_directory
from attnquant.theta.statistics import open_statistics

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from attnquant.report.page import Section

PAGE = "report.html"

_OVERVIEW = """Left is smaller, down is better. The dotted lines are the original: what
lies right of the upright one is no compression at all."""
_ERROR = """Relative error of each projection, in percent. A layer that is alone in its
band is its own base and has none."""
_SHARING = """How much of a projection's squared norm its band's base holds, and how
much base and low-rank term hold together. A base of n layers that have nothing in
common holds about 1/n of each."""
_SPECTRA = """Singular values of some layers' weights and of what the base leaves of
them. Where both curves run together, layers have nothing in common that a base could
hold; what is right of the dashed line is lost."""


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "report",
        help="make a page of pictures of bundles",
        description="Make one HTML page, and its pictures as PNG: the error of each"
        " layer and family, what each band shares, the spectra of the residuals, and,"
        " from the output of `attnquant eval --json`, size against perplexity.",
    )
    parser.add_argument(
        "bundles",
        type=Path,
        nargs="+",
        metavar="BUNDLE",
        help="directories of bundles of one checkpoint",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        required=True,
        metavar="CHECKPOINT",
        help="directory of the original",
    )
    parser.add_argument(
        "--eval",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="what `attnquant eval --json` printed, a file a bundle",
    )
    parser.add_argument(
        "--statistics",
        type=Path,
        metavar="FILE",
        help="the original's statistics; adds the error of outputs",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier report"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine, draw, write, and print what was written."""
    _need_matplotlib()
    names = [path.resolve().name for path in options.bundles]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingError(
            "BUNDLE", expected="directories of different names", found=f"two {twice[0]}"
        )
    check_target(
        options.out,
        options.reference,
        overwrite=options.overwrite,
        what="an earlier report",
        is_one=lambda directory: (directory / PAGE).is_file(),
    )
    reference = open_checkpoint(options.reference)
    bundles = [open_bundle(path) for path in options.bundles]
    evaluations = [read_evaluation(path) for path in options.eval]
    anatomies = _examine(bundles, reference, options.statistics)
    files = _write(options.out, anatomies, evaluations, reference)
    if options.json:
        data = {"report": str(options.out / PAGE), "files": sorted(files)}
        print(json.dumps(data, indent=2))
    else:
        size = format_bytes((options.out / PAGE).stat().st_size)
        print(f"{options.out / PAGE}: {size}, {len(files) - 1} pictures beside it")
    return 0


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ServingError(
            "attnquant report",
            expected="matplotlib, which draws the pictures",
            found="none installed",
            hint='Install it: pip install "attnquant-core[report]".',
        )


def _examine(
    bundles: Sequence[Bundle], reference: Checkpoint, statistics: Path | None
) -> list[Anatomy]:
    if reference.is_bundle:
        raise CheckpointError(
            str(reference.path),
            expected="a standard checkpoint",
            found="a theta bundle",
            hint="Name the checkpoint that the bundles were made from.",
        )
    supplied = installed_plugins().find(reference.architecture)
    sources = supplied.prefix_map(reference.config).rename(reference.tensors)
    original = RenamedTensors(reference.tensors, sources)
    opened = open_statistics(statistics) if statistics else None
    anatomies = []
    for bundle in bundles:
        with tqdm(
            total=0,
            desc=bundle.checkpoint.path.name,
            unit="matrix",
            disable=None,
            file=sys.stderr,
        ) as bar:
            anatomies.append(examine(bundle, original, opened, _show_on(bar)))
    return anatomies


def _write(
    out: Path,
    anatomies: Sequence[Anatomy],
    evaluations: Sequence[EvaluationFigures],
    reference: Checkpoint,
) -> list[str]:
    from attnquant.report.page import Picture, render
    from attnquant.report.plots import size_and_perplexity

    sections = [_section(anatomy) for anatomy in anatomies]
    overview = None
    if evaluations:
        overview = Picture(
            "size-and-perplexity.png",
            "Size of each bundle against its perplexity on each text.",
            _OVERVIEW,
            size_and_perplexity(evaluations),
        )
    pictures = [picture for s in sections for _, picture in s.pictures]
    pictures += [overview] if overview else []
    with whole_directory(out, "a report") as directory:
        for picture in pictures:
            (directory / picture.file).write_bytes(picture.png)
        page = render(sections, evaluations, overview, reference)
        (directory / PAGE).write_text(page, encoding="utf-8")
    return [PAGE, *(picture.file for picture in pictures)]


def _section(anatomy: Anatomy) -> Section:
    from attnquant.report.page import Picture, Section
    from attnquant.report.plots import error_map, sharing_map, spectra

    name = anatomy.bundle.checkpoint.path.resolve().name
    error = Picture(
        f"{name}-error.png",
        f"Heat map of the error of each layer and family of {name}.",
        _ERROR,
        error_map(anatomy),
    )
    sharing = Picture(
        f"{name}-sharing.png",
        f"Heat map of what the bases of {name} hold of each projection.",
        _SHARING,
        sharing_map(anatomy),
    )
    drawn = [("Where the error is", error), ("What each band shares", sharing)]
    if (png := spectra(anatomy)) is not None:
        rest = Picture(
            f"{name}-spectra.png",
            f"Singular values of weights and residuals of {name}.",
            _SPECTRA,
            png,
        )
        drawn.append(("What is left for the low-rank term", rest))
    return Section(anatomy, drawn)


def _show_on(bar: tqdm[Never]) -> Progress:
    def show(what: str, done: int, total: int) -> None:
        bar.total = total
        bar.set_postfix_str(what, refresh=False)
        bar.update(done - bar.n)

    return show
