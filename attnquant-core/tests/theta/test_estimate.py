"""An estimate from headers alone equals what is then written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from attnquant.theta.bundle import open_bundle
from attnquant.theta.checkpoint import Tensors, open_checkpoint
from attnquant.theta.estimate import Estimate, estimate
from attnquant.theta.grouping import Group
from attnquant.theta.prefix_map import PrefixMap
from attnquant.theta.writer import Plan, plan_decomposition, write_bundle
from core_support.bundles import write_tiny_statistics
from core_support.tiny import write_tiny_checkpoint

PREFIXES = PrefixMap({"model.": "", "lm_head.": "lm_head."})


def odd_and_even(layer: int, family: str) -> Group:
    return ("even", "odd")[layer % 2] if family == "q_proj" else ""


def plan_of(path: Path, blocks: int, rank: int | None, tie: str = "all") -> Plan:
    return plan_decomposition(
        open_checkpoint(path),
        PREFIXES,
        odd_and_even,
        shared_blocks=blocks,
        lora_rank=rank,
        tie_families=tie,
    )


def no_reading(tensors: Tensors, name: str) -> None:
    pytest.fail(f"{name} of {len(tensors)} tensors was read")


@pytest.mark.parametrize("tie", ["all", "attn"])
@pytest.mark.parametrize(("blocks", "rank"), [(1, 2), (2, 3), (3, 5), (4, None)])
def test_bytes_and_tensors_are_those_of_the_bundle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    rank: int | None,
    tie: str,
) -> None:
    plan = plan_of(write_tiny_checkpoint(tmp_path / "model"), blocks, rank, tie)
    with monkeypatch.context() as patch:
        patch.setattr(Tensors, "__getitem__", no_reading)
        found = estimate(plan)
    written = write_bundle(plan, tmp_path / "bundle")
    assert found.bundle_bytes == written.bundle_bytes
    assert found.source_bytes == written.source_bytes
    assert found.tensors == len(open_bundle(written.path).checkpoint.tensors)
    parts = sum(group.theta_bytes for group in found.groups) + found.kept_bytes
    assert found.bundle_bytes == parts
    before = sum(group.source_bytes for group in found.groups) + found.kept_bytes
    assert found.source_bytes == before


def test_groups_are_told_apart(tmp_path: Path) -> None:
    plan = plan_of(write_tiny_checkpoint(tmp_path / "model"), 1, 2)
    groups = {(g.family, g.group): g for g in estimate(plan).groups}
    even = groups["q_proj", "even"]
    assert (even.bases, even.layers, even.rank) == (1, 2, 2)
    assert groups["k_proj", ""].layers == 4
    assert ("q_proj", "") not in groups


def estimated(path: Path, blocks: int, rank: int | None) -> Estimate:
    return estimate(plan_of(path, blocks, rank))


def test_passthrough_takes_no_arithmetic(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    assert estimated(path, 4, None).seconds == 0.0
    assert estimated(path, 2, 3).seconds > 0.0


@pytest.mark.parametrize("rank", [3, 8])
def test_the_weighted_method_takes_more_of_all(tmp_path: Path, rank: int) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    plain = plan_of(path, 2, rank)
    statistics = write_tiny_statistics(tmp_path / "statistics", path)
    weighted = dataclasses.replace(plain, statistics=statistics)
    assert estimate(weighted).peak_bytes > estimate(plain).peak_bytes
    assert estimate(weighted).bundle_bytes == estimate(plain).bundle_bytes


def test_memory_covers_the_matrices_of_a_band(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    peaks = [estimated(path, blocks, 3).peak_bytes for blocks in (1, 2)]
    matrix = 20 * 12 * 4
    assert peaks[0] - peaks[1] == 2 * matrix
    assert peaks[1] > 2 * matrix
