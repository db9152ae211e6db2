"""Exports of Gemma 3 bundles have the names and the config of Gemma 3's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from attnquant.cli.main import main
from attnquant.testing.checkpoints import read_checkpoint
from attnquant.testing.parity import make_bundle
from gemma3_support import golden
from gemma3_support.tiny import write_tiny_checkpoint


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_checkpoint(
        tmp_path / "tiny", num_layers=4, tie_word_embeddings=request.param
    )


def export(checkpoint: Path, setting: golden.Setting, form: str) -> Path:
    bundle = make_bundle(checkpoint, setting, checkpoint.parent / "bundle")
    out = checkpoint.parent / form
    assert main(["export", str(bundle), "--to", form, "--out", str(out)]) == 0
    return out


def test_a_dense_export_has_the_tensors_of_the_checkpoint(checkpoint: Path) -> None:
    setting = golden.Setting("g2-r8-all", 2, 8)
    weights, config = read_checkpoint(checkpoint)
    exported, exported_config = read_checkpoint(export(checkpoint, setting, "dense"))
    assert exported_config == config
    assert {name: array.shape for name, array in exported.items()} == {
        name: array.shape for name, array in weights.items()
    }
    changed = {
        name
        for name, array in weights.items()
        if not np.array_equal(array, exported[name])
    }
    projections = {name for name in weights if "_proj." in name}
    assert changed == projections
    assert len(projections) == 4 * 7


def test_transformers_reads_the_config_of_an_export(checkpoint: Path) -> None:
    out = export(checkpoint, golden.Setting("g2-r8-all", 2, 8), "dense")
    config, expected = (AutoConfig.from_pretrained(str(p)) for p in (out, checkpoint))
    assert type(config) is type(expected)
    assert config.architectures == ["Gemma3ForCausalLM"]
    assert not hasattr(config, "attnquant")


def test_an_adapter_is_for_modules_of_the_base(checkpoint: Path) -> None:
    out = export(checkpoint, golden.Setting("g3-r8-attn", 3, 8, "attn"), "peft")
    weights, _ = read_checkpoint(out / "base")
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    modules = config["target_modules"]
    # Of four layers in three bands, the first two share bases.
    assert sorted({module.split(".")[2] for module in modules}) == ["0", "1"]
    assert len(modules) == 2 * 4
    assert all(f"{module}.weight" in weights for module in modules)
