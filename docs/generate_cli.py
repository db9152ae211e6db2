"""Write `docs/cli.md`: the help of every `attnquant` command, 80 columns wide.

python docs/generate_cli.py            write the page
python docs/generate_cli.py --check    exit with 1 if the page is out of date
"""  # noqa: INP001 (a script, in no package)

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnquant.cli.main import build_parser

PAGE = Path(__file__).with_name("cli.md")

INTRODUCTION = """\
# The attnquant command

This page is what each command prints when asked for `--help`. It is made by
`docs/generate_cli.py`, and a test compares it with the program.

Every command exits with 0 if all went well, with 1 after an error (one line on
standard error that names what is wrong, what was expected and what was found), with 2
after wrong usage, and with 130 if it was interrupted. `attnquant plugins` has
[one more reason to exit with 1](plugins.md#the-plugins-command), and so have
[`doctor`](plugins.md#the-doctor-command), [`check`](plugins.md#the-check-command) and,
if it is asked to, [`eval`](tools.md#evaluate). What a command writes is there as a
whole or not at all. [Decompose](decompose.md) explains the options of `decompose` and
its summary, [Tools](tools.md) the commands around it, and
[Theta bundle](theta-bundle.md#what-a-reader-refuses) what `inspect` checks.
"""


def render() -> str:
    """Return the whole page."""
    sections = [
        f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"
        for parser in parsers()
    ]
    return "\n".join([INTRODUCTION, *sections])


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of `attnquant` itself, then that of each command."""
    main = build_parser()
    yield main
    for action in main._actions:  # noqa: SLF001 (argparse has no public way)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            yield from action.choices.values()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/cli.md.")
    parser.add_argument(
        "--check", action="store_true", help="only say whether it is up to date"
    )
    options = parser.parse_args(arguments)
    # What argparse looks at: the width, and whether to use colours (Python 3.14).
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    page = render()
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.stderr.write(f"{PAGE} is out of date: run python docs/generate_cli.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
