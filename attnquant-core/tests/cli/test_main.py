"""The command itself: usage, exit codes, and errors in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attnquant
from attnquant.cli import inspect as inspect_command
from core_support import processes
from core_support.processes import MAIN, Run, environment

COMMANDS = ["decompose", "inspect", "plugins"]


def test_the_version_is_printed(run: Run) -> None:
    assert (0, f"attnquant {attnquant.__version__}\n", "") == run("--version")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_in_the_help(run: Run, command: str) -> None:
    done = run("--help")
    assert done.code == 0
    commands = done.out.partition("commands:")[2]
    assert command in commands.split()


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: attnquant {command}")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["inspect"],
        ["inspect", "a", "b"],
        ["plugins", "--unknown"],
        ["decompose", "model"],
        ["decompose", "model", "--out", "bundle"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("usage: attnquant")
    assert "Traceback" not in done.err


def raising(error: type[BaseException]) -> Callable[..., int]:
    def run(_options: object) -> int:
        raise error

    return run


def test_an_interrupted_command_exits_with_130(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_command, "run", raising(KeyboardInterrupt))
    done = run("inspect", "x")
    assert done == (130, "", "attnquant: interrupted; nothing was written\n")


def test_a_bug_is_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_command, "run", raising(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        run("inspect", "x")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(unbuffered: str) -> None:
    # As `head -0` does, or a pager that is quit.
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "plugins", "--json"],
        env=environment(PYTHONUNBUFFERED=unbuffered),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_an_error_of_a_fresh_process_is_one_line_and_exit_code_1(
    tmp_path: Path,
) -> None:
    done = processes.attnquant("inspect", tmp_path / "absent")
    assert done.error().startswith(f"{tmp_path / 'absent'}: expected a checkpoint")
