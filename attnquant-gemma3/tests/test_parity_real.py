"""The real Gemma 3 270M, served, equals transformers: at passthrough and at G < L."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from attnquant.testing.checkpoints import digest, read_checkpoint
from attnquant.testing.in_process import InProcessModel
from attnquant.testing.metrics import compare_logits
from attnquant.testing.parity import (
    LIMIT,
    check_batch,
    check_record,
    make_bundle,
    serving,
)
from attnquant.theta import lowrank, reconstruct
from attnquant.theta.bundle import open_bundle
from gemma3_support import golden
from gemma3_support.oracle import forward

pytestmark = pytest.mark.real_model

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "gemma3-270m.npz")
CASES: Final = [
    ("passthrough", "gemm"),
    ("g9-r64-all", "gemm"),
    ("g9-r64-all", "fused"),
    ("passthrough", "dense"),
    ("g9-r64-all", "dense"),
    ("g6-r16-attn", "dense"),
]


def records_of(setting: str) -> list[golden.Record]:
    return [record for record in GOLDEN.records if record.setting.name == setting]


@pytest.fixture(scope="module")
def bundles(
    real_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bundles")
    settings = {record.setting.name: record.setting for record in GOLDEN.records}
    # The records are of the exact truncated SVD; where directions are sampled, the
    # weights themselves are others, as close to the originals (within 1%).
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank, "_SAMPLED_SHARE", 0.0)
        return {
            name: make_bundle(real_checkpoint, setting, root / name)
            for name, setting in settings.items()
        }


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def served(
    request: pytest.FixtureRequest, bundles: dict[str, Path]
) -> Iterator[tuple[InProcessModel, list[golden.Record]]]:
    setting, formulation = request.param
    with serving(bundles[setting], formulation) as model:
        yield model, records_of(setting)


def test_the_checkpoint_is_the_one_the_records_were_made_from(
    real_checkpoint: Path,
) -> None:
    weights, _ = read_checkpoint(real_checkpoint)
    assert digest(weights) == GOLDEN.source("gemma3-270m").digest


def test_every_prompt_equals_transformers_alone_and_in_a_batch(
    served: tuple[InProcessModel, list[golden.Record]],
) -> None:
    model, records = served
    assert len(records) >= 5
    assert max(len(record.tokens) for record in records) > 512
    alone = [check_record(model, record, golden.compare) for record in records]
    check_batch(model, records, alone)


@pytest.mark.parametrize("formulation", ["gemm", "fused"])
def test_a_bfloat16_bundle_equals_the_oracle_over_the_whole_vocabulary(
    real_checkpoint: Path, tmp_path: Path, formulation: str
) -> None:
    # `fused` keeps it in bfloat16 and widens in registers, which rounds nothing: the
    # limit is that of float32.
    (record,) = [r for r in records_of("g9-r64-all") if r.prompt == "window"]
    path = make_bundle(real_checkpoint, record.setting, tmp_path / "b", "bfloat16")
    bundle = open_bundle(path)
    weights, config = read_checkpoint(real_checkpoint)
    effective = reconstruct(bundle.checkpoint.tensors, bundle.info.layout)
    weights.update({f"model.{name}": weight for name, weight in effective.items()})
    expected = forward(
        weights, config, record.tokens, dtype=np.float32, positions="last"
    )
    with serving(path, formulation) as model:
        (found,) = model.generate([record.tokens])
    apart = compare_logits(expected, found.logits[:1])
    print(f"bfloat16 bundle, {formulation}: {apart}")
    assert max(apart) < LIMIT


def test_the_bundle_keeps_the_tokenizer(real_checkpoint: Path, bundles) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        expected = (real_checkpoint / name).read_bytes()
        assert expected == (bundles["g9-r64-all"] / name).read_bytes()
    config = json.loads((bundles["g9-r64-all"] / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
