"""`attnquant serve`: `max serve` with the flags that a bundle needs here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from attnquant.cli.launching import add_launch_options, launch

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a bundle with MAX",
        description="Check a bundle, print the `max serve` command that serves it, and"
        " become it. `--custom-architectures attnquant` is added, and on a machine"
        " without a GPU `--devices cpu --quantization-encoding float32`; flags of your"
        " own win. `attnquant serve BUNDLE --help` lists those of MAX.",
    )
    add_launch_options(parser, "serve")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Become `max serve`, unless the command is only wanted in print."""
    return launch("serve", options)
