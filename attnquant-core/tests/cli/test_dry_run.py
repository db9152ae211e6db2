"""`attnquant decompose --dry-run`: figures, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnquant.cli.text import format_duration
from core_support.processes import Run


def test_it_prints_a_table_and_writes_nothing(run: Run, model: Path) -> None:
    before = sorted(model.parent.iterdir())
    done = run("decompose", model, "--blocks=2", "--rank=3", "--dry-run")
    assert done.code == 0
    assert "4 layers in 2 bands, rank 3" in done.out
    assert "down_proj" in done.out
    assert "nothing was written" in done.out
    assert before == sorted(model.parent.iterdir())


def test_an_out_beside_it_is_not_made(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    done = run("decompose", model, "--blocks=4", "--dry-run", "--out", out, "--json")
    figures = json.loads(done.out)
    assert figures["shared_blocks"] == 4
    assert figures["ratio"] == pytest.approx(1.0)
    assert not out.exists()


def test_without_out_or_dry_run_the_usage_names_both(run: Run, model: Path) -> None:
    done = run("decompose", model, "--blocks=4")
    assert done.code == 2
    assert "--out" in done.err
    assert "--dry-run" in done.err


def test_what_cannot_be_decomposed_is_refused_dry_as_well(
    run: Run, model: Path
) -> None:
    done = run("decompose", model, "--blocks=2", "--rank=999", "--dry-run")
    assert done.code == 1
    assert "--rank: expected at most 12" in done.err


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (90, "90 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_durations_come_in_the_unit_that_suits(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
