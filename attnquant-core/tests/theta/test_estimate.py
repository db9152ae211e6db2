"""An estimate from headers alone equals what is then written."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.theta.bundle import open_bundle
from attnquant.theta.checkpoint import Tensors, open_checkpoint
from attnquant.theta.estimate import Estimate, estimate
from attnquant.theta.grouping import Group
from attnquant.theta.prefix_map import PrefixMap
from attnquant.theta.writer import Plan, plan_decomposition, write_bundle
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
        found = estimate(plan, 10**9)
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
    groups = {(g.family, g.group): g for g in estimate(plan, 10**9).groups}
    even = groups["q_proj", "even"]
    assert (even.bases, even.layers, even.rank) == (1, 2, 2)
    assert groups["k_proj", ""].layers == 4
    assert ("q_proj", "") not in groups


def estimated(path: Path, blocks: int, rank: int | None) -> Estimate:
    return estimate(plan_of(path, blocks, rank), 10**9)


def test_passthrough_takes_no_arithmetic(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    assert estimated(path, 4, None).seconds == 0.0
    assert estimated(path, 2, 3).seconds > 0.0


def test_a_smaller_shard_takes_less_memory(tmp_path: Path) -> None:
    plan = plan_of(write_tiny_checkpoint(tmp_path / "model"), 2, 3)
    large, small = estimate(plan, 10**9), estimate(plan, 1000)
    assert large.peak_bytes - small.peak_bytes == large.bundle_bytes - 1000
