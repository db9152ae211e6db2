"""Served tiny models equal transformers, in every formulation, alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from attnquant.testing.in_process import InProcessModel
from attnquant.testing.metrics import compare_logits
from attnquant.testing.parity import (
    check_batch,
    check_record,
    make_bundle,
    serving,
)
from gemma3_support import golden
from gemma3_support.tiny import write_tiny_checkpoint

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
# Each formulation at passthrough and below. What differs in the graph's body costs a
# compilation, so gemm at passthrough is left to the real model.
# The third source has a sliding window that MAX cannot compile for CPUs.
CASES: Final = [
    ("tied", "g3-r4-all", "gemm"),
    ("tied", "g5-r8-attn", "gemm"),
    ("tied", "passthrough", "dense"),
    ("tied", "g3-r4-all", "dense"),
    ("tied", "g5-r8-attn", "dense"),
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


@pytest.mark.parametrize(
    ("setting", "formulation", "environ"),
    [
        ("passthrough", "dense", {"ATTNQUANT_BLOCKS": "8"}),
        ("passthrough", "dense", {}),
        ("g3-r4-all", "gemm", {"ATTNQUANT_BLOCKS": "3", "ATTNQUANT_RANK": "4"}),
    ],
)
def test_a_raw_checkpoint_is_decomposed_while_loading(
    checkpoints: dict[str, Path],
    setting: str,
    formulation: str,
    environ: dict[str, str],
) -> None:
    with serving(checkpoints["tied"], formulation, **environ) as model:
        for record in GOLDEN.records:
            if (record.source, record.setting.name) == ("tied", setting):
                check_record(model, record, golden.compare)


def test_formulations_give_the_same_logits(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    setting = golden.Setting("g3-r4-all", 3, 4)
    bundle = make_bundle(checkpoints["tied"], setting, tmp_path / "bundle")
    prompt = [2, *range(40, 240)]
    results = []
    for formulation in ("gemm", "dense"):
        with serving(bundle, formulation) as model:
            results.append(model.generate([prompt], 8)[0])
    found = compare_logits(*(result.logits for result in results))
    print(f"gemm and dense: {found.cosine_distance:.1e}, {found.kl:.1e}")
    assert max(found) < 1e-6
