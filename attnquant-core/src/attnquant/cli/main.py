"""Entry point of the `attnquant` command: parsing, and errors as one line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import attnquant
from attnquant.cli import (
    cache,
    calibrate,
    check,
    decompose,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    new_model,
    plugins,
    report,
    serve,
)
from attnquant.errors import AttnQuantError
from attnquant.settings import warn_unknown_variables

COMMANDS = (
    cache,
    calibrate,
    check,
    decompose,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    new_model,
    plugins,
    report,
    serve,
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="attnquant", description="Make, look at and serve theta bundles."
    )
    parser.add_argument(
        "--version", action="version", version=f"attnquant {attnquant.__version__}"
    )
    commands = parser.add_subparsers(
        dest="command", required=True, title="commands", metavar="COMMAND"
    )
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 if all went well, 1 after an error that has been printed, 130 if
        interrupted. Wrong usage exits with 2, as argparse does.
    """
    options = build_parser().parse_args(arguments)
    warn_unknown_variables(os.environ)
    # As an exception, so that what is half-written is removed on the way out.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        status: int = options.run(options)
        # Here, and not as the interpreter ends, where it could not be caught.
        sys.stdout.flush()
    except AttnQuantError as error:
        print(f"attnquant: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("attnquant: interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (`head`, say) has left: not an error of ours. What
        # is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _exit_on_signal(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
