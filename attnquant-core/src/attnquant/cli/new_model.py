"""`attnquant new-model`: the frame of a package for another architecture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attnquant.cli.scaffold import MARK, PLAIN, SOURCES, NewModel, write_package
from attnquant.cli.scaffold import class_name as as_class

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "new-model",
        help="write the frame of a package for another architecture",
        description="Write a package that installs, passes its linters and the"
        " structural part of the conformance kit. Each place that needs a decision is"
        f" marked with `{MARK}` and says what to decide.",
    )
    parser.add_argument(
        "name", metavar="NAME", help="the plugin's name, such as mymodel"
    )
    parser.add_argument(
        "--from",
        dest="source",
        choices=list(SOURCES),
        default=PLAIN,
        help="what to begin with: "
        + "; ".join(f"{name} ({text})" for name, text in SOURCES.items())
        + "; by default %(default)s",
    )
    parser.add_argument(
        "--architecture",
        metavar="CLASS",
        help="as in `architectures` of config.json; by default NAMEForCausalLM",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the package's folder; by default attnquant-NAME here",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the package, and say what to do next."""
    architecture = options.architecture or f"{as_class(options.name)}ForCausalLM"
    new = NewModel(options.name, architecture, options.source)
    out = options.out or Path(new.distribution)
    files = write_package(new, out)
    print(f"wrote {len(files)} files into {out}")
    print(f"Next: grep -rn '{MARK}' {out}")
    print(f"      pip install --editable '{out.resolve()}[dev]'")
    print(f"      attnquant check {new.name} --parts structural")
    return 0
