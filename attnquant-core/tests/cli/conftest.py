"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.cli.main import main
from core_support.processes import Done, Run
from core_support.tiny import write_tiny_checkpoint


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Give a function that runs the command in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def model(tmp_path: Path, tiny_plugin: Path) -> Path:  # noqa: ARG001 (for its effect)
    """Write a tiny checkpoint that the installed tiny plugin knows."""
    return write_tiny_checkpoint(tmp_path / "model")
