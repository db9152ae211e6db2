"""The weight adapter: names of the graph, and the very tensors a bundle holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from max.dtype import DType
from max.graph.weights import WeightData, load_weights
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from attnquant.serving.arrays import to_array
from attnquant.serving.weight_adapter import Adapted
from attnquant.settings import Settings
from attnquant.testing.parity import make_bundle
from attnquant.theta.bundle import open_bundle
from attnquant.theta.names import is_theta_name
from attnquant_gemma4.model_config import decoder_config
from attnquant_gemma4.weight_adapters import convert_safetensor_state_dict
from gemma4_support.golden import Setting
from gemma4_support.tiny import write_tiny_checkpoint

PREFIX: Final = "language_model."
SETTINGS: Final = [Setting("a", 4, 4), Setting("b", 5, 8, "attn"), Setting("c", 1, 16)]


def adapt(
    path: Path, settings: Settings | None = None, dtype: DType | None = None
) -> Adapted:
    """Adapt a directory's weights as the pipeline model does."""
    weights = load_weights(sorted(path.glob("*.safetensors")))
    data: dict[str, WeightData] = {name: w.data() for name, w in weights.items()}
    config = decoder_config(AutoConfig.from_pretrained(path))
    return convert_safetensor_state_dict.adapt(data, config, dtype, settings)


def settings_of(setting: Setting, formulation: str = "gemm") -> Settings:
    assert setting.shared_blocks is not None
    return Settings(
        setting.shared_blocks, setting.rank, setting.families, formulation, "a test"
    )


def flat(name: str) -> str:
    """Turn a nested name of the graph back into the flat one of a bundle."""
    name = name.removeprefix(PREFIX)
    if not name.startswith("layers.") or name.endswith(("weight", "scalar")):
        return name
    return name.replace(".self_attn.", ".").replace(".mlp.", ".")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_a_bundle_and_decomposing_at_load_give_the_same_bits(
    tmp_path: Path, setting: Setting, dtype: str
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", dtype=dtype)
    bundle = make_bundle(checkpoint, setting, tmp_path / "bundle", dtype)
    stored = open_bundle(bundle).checkpoint.tensors
    for adapted in (adapt(checkpoint, settings_of(setting)), adapt(bundle)):
        loaded = {flat(name): to_array(w) for name, w in adapted.state_dict.items()}
        assert set(stored) == set(loaded)
        theta = [name for name in stored if is_theta_name(name)]
        assert theta
        for name in theta:
            assert stored[name].dtype == loaded[name].dtype
            assert stored[name].tobytes() == loaded[name].tobytes(), name


def test_names_are_nested_and_prefixed(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    names = adapt(checkpoint, settings_of(SETTINGS[0])).state_dict.keys()
    expected = {
        "language_model.W0.0.sliding_attention.q_proj",
        "language_model.W0.3.full_attention.q_proj",
        "language_model.W0.3.down_proj",
        "language_model.layers.0.self_attn.q_proj.U",
        "language_model.layers.4.mlp.down_proj.V",
        "language_model.layers.5.layer_scalar",
        "language_model.norm.weight",
    }
    assert expected <= names
    assert all(name.startswith(PREFIX) for name in names)
    assert not any("q_proj.weight" in name for name in names)


def test_every_weight_is_cast_to_the_models_dtype(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", dtype="bfloat16")
    adapted = adapt(checkpoint, settings_of(SETTINGS[0]), DType.float32)
    assert {w.dtype for w in adapted.state_dict.values()} == {DType.float32}


def test_dense_rebuilds_every_projection_outside_the_graph(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    full = Setting("full rank", 4, 96)
    adapted = adapt(checkpoint, settings_of(full, "dense"), DType.float32)
    original = load_file(next(checkpoint.glob("*.safetensors")))
    names = {name.removeprefix("model."): name for name in original}
    assert names.keys() == adapted.state_dict.keys()
    for graph_name, name in names.items():
        found = to_array(adapted.state_dict[graph_name])
        np.testing.assert_allclose(found, original[name], atol=2e-6)


def test_experts_are_named_as_in_max_and_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(
        tmp_path / "tiny",
        layer_types="sf",
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=48,
    )
    adapted = adapt(checkpoint, settings_of(Setting("one", 1, 4))).state_dict
    original = load_file(next(checkpoint.glob("*.safetensors")))
    layer = "language_model.layers.1."
    for name, graph_name in {
        "router.proj.weight": "moe_block.gate.gate_score.weight",
        "router.scale": "moe_block.gate.scale",
        "router.per_expert_scale": "moe_block.gate.per_expert_scale",
        "pre_feedforward_layernorm_2.weight": "moe_block.pre_expert_norm.weight",
        "experts.gate_up_proj": "moe_block.experts.gate_up_proj",
        "experts.down_proj": "moe_block.experts.down_proj",
        "post_feedforward_layernorm_2.weight": "post_feedforward_layernorm_2.weight",
    }.items():
        found = to_array(adapted[layer + graph_name])
        np.testing.assert_array_equal(found, original[f"model.{layer}{name}"])


@pytest.mark.parametrize("bundled", [False, True])
def test_towers_are_left_out_of_the_graph(tmp_path: Path, *, bundled: bool) -> None:
    extra = {
        f"model.{tower}x.weight": np.ones((2, 3), np.float32)
        for tower in ("vision_tower.", "embed_vision.", "audio_tower.")
    }
    path = write_tiny_checkpoint(tmp_path / "tiny", extra=extra)
    settings: Settings | None = settings_of(SETTINGS[0])
    if bundled:
        path = make_bundle(path, SETTINGS[0], tmp_path / "bundle")
        settings = None
    names = adapt(path, settings).state_dict.keys()
    assert not any("tower" in name or "embed_vision" in name for name in names)


@pytest.mark.parametrize("said", [False, True])
def test_a_copy_of_a_tied_head_is_left_out(tmp_path: Path, *, said: bool) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    if not said:
        # transformers' default, then.
        config = json.loads((checkpoint / "config.json").read_text())
        del config["text_config"]["tie_word_embeddings"]
        (checkpoint / "config.json").write_text(json.dumps(config))
    file = next(checkpoint.glob("*.safetensors"))
    weights = load_file(file)
    head = weights["model.language_model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": head}, file)
    bundle = make_bundle(checkpoint, SETTINGS[0], tmp_path / "bundle")
    for adapted in (adapt(checkpoint, settings_of(SETTINGS[0])), adapt(bundle)):
        assert "language_model.lm_head.weight" not in adapted.state_dict
