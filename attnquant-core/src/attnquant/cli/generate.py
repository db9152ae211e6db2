"""`attnquant generate`: `max generate` with the flags that a bundle needs here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from attnquant.cli.launching import add_launch_options, launch

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "generate",
        help="generate text from a bundle with MAX",
        description="Check a bundle, print the `max generate` command that runs it, and"
        " become it. `--custom-architectures attnquant` is added, and on a machine"
        " without a GPU `--devices cpu --quantization-encoding float32`; flags of your"
        " own win. `attnquant generate BUNDLE --help` lists those of MAX.",
    )
    add_launch_options(parser, "generate")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Become `max generate`, unless the command is only wanted in print."""
    return launch("generate", options)
