"""`attnquant export`: a bundle as what other software reads."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Never

from tqdm import tqdm

from attnquant.errors import SettingError
from attnquant.export.dense import export_dense
from attnquant.export.files import Progress
from attnquant.export.peft import export_peft
from attnquant.plugins import installed_plugins
from attnquant.sizes import format_bytes
from attnquant.theta.bundle import open_bundle
from attnquant.theta.dtypes import STORAGE_DTYPES

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DENSE, PEFT = "dense", "peft"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "export",
        help="write a bundle as a plain checkpoint or a PEFT adapter",
        description="Write a bundle in a form that other software reads. `dense` is a"
        " plain checkpoint, every projection multiplied out. `peft` is two directories:"
        " `base`, a checkpoint of the shared bases, and `adapter`, a LoRA on it.",
    )
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument("--to", choices=(DENSE, PEFT), required=True, help="the form")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write it to"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(STORAGE_DTYPES),
        help="dtype of the projections of `dense` (default: the bundle's)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier export"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Export and print a summary."""
    if options.to == PEFT and options.dtype:
        raise SettingError(
            "--dtype",
            expected=f"nothing with --to {PEFT}, whose base has the bundle's dtype",
            found=options.dtype,
        )
    bundle = open_bundle(options.bundle)
    supplied = installed_plugins().find(bundle.checkpoint.architecture)
    prefix_map = supplied.prefix_map(bundle.checkpoint.config)
    with tqdm(
        total=0, desc="export", unit="tensor", disable=None, file=sys.stderr
    ) as bar:
        if options.to == DENSE:
            size = export_dense(
                bundle,
                prefix_map,
                options.out,
                dtype=options.dtype,
                overwrite=options.overwrite,
                progress=_show_on(bar),
            )
        else:
            size = export_peft(
                bundle,
                prefix_map,
                options.out,
                overwrite=options.overwrite,
                progress=_show_on(bar),
            )
    if options.json:
        data = {"out": str(options.out), "form": options.to, "bytes": size}
        print(json.dumps(data, indent=2))
    else:
        print(f"{options.out}: {options.to}, {format_bytes(size)}")
    return 0


def _show_on(bar: tqdm[Never]) -> Progress:
    def show(what: str, done: int, total: int) -> None:
        bar.total = total
        bar.set_postfix_str(what, refresh=False)
        bar.update(done - bar.n)

    return show
