"""Served tiny models equal transformers, in every formulation, alone and in a batch.

A compile takes a minute or two, and there are three.
"""

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
from gemma4_support import golden
from gemma4_support.tiny import write_tiny_checkpoint

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
# What the conformance kit, on the first of these models, does not serve, in as few
# graphs as that takes: in dense, both settings have the same one.
SERVED: Final = [
    ("irregular", "passthrough", "gemm"),
    ("experts", "passthrough", "dense"),
    ("experts", "g2-r4-all", "dense"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {
        source.name: write_tiny_checkpoint(root / source.name, **source.recipe)
        for source in GOLDEN.sources
    }


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[InProcessModel, list[golden.Record]]]:
    source, setting, formulation = request.param
    records = GOLDEN.of(source, setting)
    out = tmp_path_factory.mktemp("bundle") / setting
    bundle = make_bundle(checkpoints[source], records[0].setting, out)
    with serving(bundle, formulation) as model:
        yield model, records


def test_every_prompt_equals_transformers_alone_and_in_a_batch(
    served: tuple[InProcessModel, list[golden.Record]],
) -> None:
    model, records = served
    alone = [check_record(model, record, golden.compare) for record in records]
    assert max(len(record.tokens) for record in records) > 2 * 128
    check_batch(model, records, alone)


@pytest.mark.parametrize("unified", [False, True])
def test_a_raw_checkpoint_is_decomposed_while_loading(
    tmp_path: Path, *, unified: bool
) -> None:
    # The 12B line has another architecture's name, and the same decoder.
    recipe = GOLDEN.source("pattern").recipe
    path = write_tiny_checkpoint(tmp_path / "tiny", unified=unified, **recipe)
    environ = {"ATTNQUANT_BLOCKS": "4", "ATTNQUANT_RANK": "4"}
    with serving(path, "gemm", **environ) as model:
        for record in GOLDEN.of("pattern", "g4-r4-all"):
            check_record(model, record, golden.compare)
