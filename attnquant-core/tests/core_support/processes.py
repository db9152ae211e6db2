"""Fresh Python processes: the command as a user runs it, and what imports cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

MAIN = "import sys; from attnquant.cli.main import main; sys.exit(main())"


class Done(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """Check that this is a failure told in one line, and return that line."""
        assert self.code == 1
        assert self.out == ""
        assert self.err.startswith("attnquant: error: ")
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1
        return self.err.removeprefix("attnquant: error: ").rstrip()


Run = Callable[..., Done]
"""Runs the command with arguments."""


def environment(home: Path | None = None, **variables: str) -> dict[str, str]:
    """Return this process's environment without AttnQuant's variables.

    Args:
        home: A folder of fake plugins to put on the path.
        variables: What to add.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ATTNQUANT_")
    }
    return clean | ({"PYTHONPATH": str(home)} if home else {}) | variables


def python(
    code: str, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, and wait for it."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env or environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def attnquant(*arguments: object, env: dict[str, str] | None = None) -> Done:
    """Run the command in a fresh process."""
    done = python(MAIN, *arguments, env=env)
    return Done(done.returncode, done.stdout, done.stderr)


def started(
    code: str, *arguments: object, env: dict[str, str] | None = None
) -> tuple[subprocess.Popen[str], IO[str]]:
    """Start code in a fresh process; return it and its standard output."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout
