"""Served tiny models equal transformers' records, alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from attnquant.testing.in_process import InProcessModel
from attnquant.testing.parity import (
    check_batch,
    check_record,
    make_bundle,
    serving,
)
from gemma3_support import golden
from gemma3_support.tiny import write_tiny_checkpoint

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
# What the conformance kit does not serve: only attention tied, and an untied head. What
# differs in the graph's body costs a compilation; in dense, settings have the same one.
# The third source has a sliding window that MAX cannot compile for CPUs.
CASES: Final = [
    ("tied", "g5-r8-attn", "gemm"),
    ("untied", "passthrough", "dense"),
    ("untied", "g3-r4-all", "dense"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {
        source.name: write_tiny_checkpoint(root / source.name, **source.recipe or {})
        for source in GOLDEN.sources
    }


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def served(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[InProcessModel, list[golden.Record]]]:
    source, setting, formulation = request.param
    records = [
        record
        for record in GOLDEN.records
        if (record.source, record.setting.name) == (source, setting)
    ]
    out = tmp_path_factory.mktemp("bundle") / setting
    bundle = make_bundle(checkpoints[source], records[0].setting, out)
    with serving(bundle, formulation) as model:
        yield model, records


def test_every_prompt_equals_transformers_alone_and_in_a_batch(
    served: tuple[InProcessModel, list[golden.Record]],
) -> None:
    model, records = served
    alone = [check_record(model, record, golden.compare) for record in records]
    assert max(len(record.tokens) for record in records) > 128
    check_batch(model, records, alone)


def test_a_raw_checkpoint_is_decomposed_while_loading(
    checkpoints: dict[str, Path],
) -> None:
    environ = {"ATTNQUANT_BLOCKS": "3", "ATTNQUANT_RANK": "4"}
    with serving(checkpoints["tied"], "gemm", **environ) as model:
        for record in GOLDEN.records:
            if (record.source, record.setting.name) == ("tied", "g3-r4-all"):
                check_record(model, record, golden.compare)
