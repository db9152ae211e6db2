"""`attnquant generate`: `max generate` with the flags that a bundle needs here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from attnquant.cli.launching import add_launch_parser

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    add_launch_parser(
        commands,
        "generate",
        purpose="generate text from a bundle with MAX",
        verb="runs",
    )
