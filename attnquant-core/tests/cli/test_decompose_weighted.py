"""`attnquant decompose`: the weighted method, and settings that differ by family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attnquant.theta.bundle import open_bundle
from attnquant.theta.checkpoint import sha256
from attnquant.theta.names import base_name
from core_support.bundles import write_tiny_statistics
from core_support.processes import Run
from core_support.tiny import SHAPES, write_tiny_checkpoint


@pytest.fixture
def statistics(model: Path) -> Path:
    return write_tiny_statistics(model.parent / "statistics", model).path


def test_statistics_choose_the_weighted_method(
    run: Run, model: Path, statistics: Path
) -> None:
    out = model.parent / "bundle"
    options = ["--blocks", 2, "--rank", 3, "--statistics", statistics]
    summary = json.loads(run("decompose", model, "--out", out, *options, "--json").out)
    info = open_bundle(out).info
    assert summary["method"] == info.method == "weighted"
    assert summary["weighted_error"] == info.weighted_error
    assert list(SHAPES) == list(info.weighted_error)
    assert info.calibration is not None
    assert info.calibration.sha256 == sha256(statistics)
    assert info.calibration.texts[0]["name"] == "noise"


def test_outputs_are_nearer_than_by_the_plain_method_and_weights_are_not(
    run: Run, model: Path, statistics: Path
) -> None:
    options = ["--blocks", 2, "--rank", 2, "--json"]
    plain = run("decompose", model, "--out", model.parent / "plain", *options)
    out = model.parent / "weighted"
    weighted = run(
        "decompose", model, "--out", out, *options, "--statistics", statistics
    )
    error, other = json.loads(plain.out)["error"], json.loads(weighted.out)["error"]
    assert all(error[family] < other[family] for family in SHAPES)


def test_the_method_weighted_asks_for_statistics(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    options = ["--blocks", 2, "--rank", 3, "--method", "weighted"]
    error = run("decompose", model, "--out", out, *options).error()
    assert error.startswith("--statistics: expected a file of statistics")
    assert "attnquant calibrate" in error
    assert not out.exists()


def test_the_plain_method_takes_no_statistics(
    run: Run, model: Path, statistics: Path
) -> None:
    options = [
        "--blocks=2",
        "--rank=3",
        "--method=mean-svd",
        "--statistics",
        statistics,
    ]
    error = run("decompose", model, "--out", model.parent / "bundle", *options).error()
    assert error.startswith("--statistics: expected nothing")


def test_statistics_of_other_weights_are_refused(
    run: Run, model: Path, statistics: Path
) -> None:
    other = write_tiny_checkpoint(model.with_name("other"))
    raw = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    out = model.parent / "bundle"
    options = ["--blocks=2", "--rank=3", "--statistics", statistics]
    error = run("decompose", other, "--out", out, *options).error()
    assert error.startswith(f"{statistics}: expected statistics of other")
    assert not out.exists()


def test_bands_and_ranks_may_be_given_by_family(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    options = ["--blocks", "q_proj=2,k_proj=1", "--rank", "3,k_proj=2"]
    done = run("decompose", model, "--out", out, *options)
    assert done.code == 0
    layout = open_bundle(out).info.layout
    assert layout.blocks == dict.fromkeys(SHAPES, 4) | {"q_proj": 2, "k_proj": 1}
    rows = [line.split()[:3] for line in done.out.splitlines()[3:]]
    assert rows[:3] == [
        ["q_proj", "2", "3"],
        ["k_proj", "1", "2"],
        ["v_proj", "4", "0"],
    ]


@pytest.mark.parametrize("option", ["--blocks=q=2", "--rank=1,2", "--blocks=x"])
def test_what_is_no_number_by_family_is_wrong_usage(
    run: Run, model: Path, option: str
) -> None:
    blocks = [] if option.startswith("--blocks") else ["--blocks=2"]
    out = model.parent / "bundle"
    done = run("decompose", model, "--out", out, *blocks, option)
    assert (done.code, done.out) == (2, "")
    assert f"argument {option.partition('=')[0]}" in done.err


@pytest.mark.parametrize("jobs", [2, 5])
def test_jobs_change_no_byte(
    run: Run, model: Path, statistics: Path, jobs: int
) -> None:
    one, many = model.parent / "one", model.parent / "many"
    options = ["--blocks=2", "--rank=3", "--statistics", statistics]
    assert run("decompose", model, "--out", one, *options).code == 0
    assert run("decompose", model, "--out", many, *options, f"--jobs={jobs}").code == 0
    for file in one.iterdir():
        assert file.read_bytes() == (many / file.name).read_bytes(), file.name


def test_bands_are_searched_on_request(run: Run, model: Path, statistics: Path) -> None:
    out = model.parent / "bundle"
    options = ["--blocks=3", "--rank=2", "--statistics", statistics, "--bands=auto"]
    done = run("decompose", model, "--out", out, *options)
    assert (done.code, done.err) == (0, "")
    layout = open_bundle(out).info.layout
    assert layout.blocks == dict.fromkeys(SHAPES, 3)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_search_needs_statistics_and_weights(
    run: Run, model: Path, statistics: Path, more: list[str]
) -> None:
    given = [*more, "--statistics", statistics] if more else []
    options = ["--blocks=3", "--rank=2", "--bands=auto", *given]
    error = run("decompose", model, "--out", model.parent / "bundle", *options).error()
    assert error.startswith("--bands: expected equal")


def rank_zero_and_full(run: Run, model: Path, *options: object) -> tuple[int, int]:
    """Return the bounds of a budget, in bytes, as the error names them."""
    out = model.parent / "bundle"
    error = run("decompose", model, "--out", out, "--budget=1", *options).error()
    assert error.startswith("--budget: expected from ")
    assert error.endswith("found 1 bytes")
    lowest, highest = re.findall(r"(\d+)(?: bytes, which|, which)", error)
    return int(lowest), int(highest)


@pytest.mark.parametrize("bands", ["equal", "auto"])
def test_a_budget_gives_each_base_its_rank(
    run: Run, model: Path, statistics: Path, bands: str
) -> None:
    options = ["--blocks=2", "--statistics", statistics]
    lowest, highest = rank_zero_and_full(run, model, *options)
    budget = (lowest + highest) // 2
    out = model.parent / "bundle"
    done = run(
        *("decompose", model, "--out", out, *options, f"--bands={bands}"),
        *(f"--budget={budget / 1000}kB", "--json"),
    )
    assert (done.code, done.err) == (0, "")
    summary = json.loads(done.out)
    assert lowest < summary["bundle_bytes"] <= budget
    layout = open_bundle(out).info.layout
    ranks = {base_name(*base): rank for base, rank in layout.base_ranks.items()}
    assert summary["base_ranks"] == ranks
    assert set(ranks.values()) <= {0, 8, 12}
    assert len(set(ranks.values())) > 1


def test_a_bundle_of_bases_alone_is_inspected_like_any_other(
    run: Run, model: Path
) -> None:
    lowest, _ = rank_zero_and_full(run, model, "--blocks=2")
    out = model.parent / "bundle"
    done = run("decompose", model, "--out", out, "--blocks=2", f"--budget={lowest}")
    assert (done.code, done.err) == (0, "")
    assert ", rank 0, " in done.out
    assert run("inspect", out).code == 0


def test_a_budget_and_a_rank_are_wrong_usage(run: Run, model: Path) -> None:
    out = model.parent / "bundle"
    done = run(
        "decompose", model, "--out", out, "--blocks=2", "--rank=3", "--budget=9kB"
    )
    assert (done.code, done.out) == (2, "")
    assert "not allowed with argument" in done.err


def test_a_plan_alone_cannot_spread_a_budget(run: Run, model: Path) -> None:
    error = run("decompose", model, "--blocks=2", "--budget=9kB", "--dry-run").error()
    assert error.startswith("--budget: expected --rank")
    assert "reads weights" in error
