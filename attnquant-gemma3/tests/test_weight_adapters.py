"""The weight adapter: names of the graph, and the very tensors a bundle holds."""

from __future__ import annotations

from pathlib import Path

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
from attnquant_gemma3.weight_adapters import convert_safetensor_state_dict
from gemma3_support.golden import Setting
from gemma3_support.tiny import write_tiny_checkpoint

PREFIX = "language_model."


def adapt(
    path: Path, settings: Settings | None = None, dtype: DType | None = None
) -> Adapted:
    """Adapt a directory's weights as the pipeline model does."""
    weights = load_weights(sorted(path.glob("*.safetensors")))
    data: dict[str, WeightData] = {name: w.data() for name, w in weights.items()}
    config = AutoConfig.from_pretrained(path)
    return convert_safetensor_state_dict.adapt(data, config, dtype, settings)


def settings_of(setting: Setting, formulation: str = "gemm") -> Settings:
    assert setting.shared_blocks is not None
    return Settings(
        shared_blocks=setting.shared_blocks,
        lora_rank=setting.rank,
        tie_families=setting.families,
        formulation=formulation,
        origin="a test",
        requested_rank=setting.rank,
    )


def flat(name: str) -> str:
    """Turn a nested name of the graph back into the flat one of a bundle."""
    name = name.removeprefix(PREFIX)
    if not name.startswith("layers.") or name.endswith("weight"):
        return name
    return name.replace(".self_attn.", ".").replace(".mlp.", ".")


def assert_same_theta(bundle: Path, adapted: Adapted) -> None:
    stored = open_bundle(bundle).checkpoint.tensors
    loaded = {flat(name): to_array(w) for name, w in adapted.state_dict.items()}
    assert set(stored) == set(loaded)
    theta = [name for name in stored if is_theta_name(name)]
    assert theta
    for name in theta:
        assert stored[name].dtype == loaded[name].dtype
        assert stored[name].tobytes() == loaded[name].tobytes(), name


SETTINGS = [Setting("a", 3, 4), Setting("b", 5, 8, "attn"), Setting("c", 1, 16)]


def test_a_bfloat16_bundle_and_decomposing_at_load_give_the_same_bits(
    tmp_path: Path,
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", dtype="bfloat16")
    setting = SETTINGS[1]
    bundle = make_bundle(checkpoint, setting, tmp_path / "bundle", "bfloat16")
    assert_same_theta(bundle, adapt(checkpoint, settings_of(setting)))
    assert_same_theta(bundle, adapt(bundle))


@pytest.mark.real_model
def test_the_same_holds_on_the_real_model(
    real_checkpoint: Path, tmp_path: Path
) -> None:
    setting = Setting("real", 17, 16)
    bundle = make_bundle(real_checkpoint, setting, tmp_path / "bundle", "bfloat16")
    assert_same_theta(bundle, adapt(real_checkpoint, settings_of(setting)))


def test_names_are_nested_and_prefixed(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    names = adapt(checkpoint, settings_of(SETTINGS[0])).state_dict.keys()
    expected = {
        "language_model.W0.0.q_proj",
        "language_model.W0.2.down_proj",
        "language_model.layers.0.self_attn.q_proj.U",
        "language_model.layers.7.mlp.down_proj.V",
        "language_model.layers.7.self_attn.q_norm.weight",
        "language_model.embed_tokens.weight",
        "language_model.norm.weight",
    }
    assert expected <= names
    assert all(name.startswith(PREFIX) for name in names)
    assert not any("q_proj.weight" in name for name in names)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_every_weight_is_cast_to_the_models_dtype(tmp_path: Path, dtype: DType) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", dtype="bfloat16")
    adapted = adapt(checkpoint, settings_of(SETTINGS[0]), dtype)
    assert {weight.dtype for weight in adapted.state_dict.values()} == {dtype}
    exact = load_file(next(checkpoint.glob("*.safetensors")))["model.norm.weight"]
    found = to_array(adapted.state_dict["language_model.norm.weight"])
    np.testing.assert_array_equal(exact.astype(np.float32), found.astype(np.float32))


def test_dense_rebuilds_every_projection_outside_the_graph(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    full = Setting("full rank", 3, 96)
    adapted = adapt(checkpoint, settings_of(full, "dense"), DType.float32)
    original = load_file(next(checkpoint.glob("*.safetensors")))
    names = {name.replace("model.", PREFIX, 1): name for name in original}
    assert names.keys() == adapted.state_dict.keys()
    for graph_name, name in names.items():
        found = to_array(adapted.state_dict[graph_name])
        np.testing.assert_allclose(found, original[name], atol=2e-6)


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model."]
)
def test_every_way_of_naming_a_checkpoint_comes_to_the_same(
    tmp_path: Path, prefix: str
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", tie_word_embeddings=False)
    settings = settings_of(SETTINGS[0])
    expected = adapt(checkpoint, settings).state_dict
    file = next(checkpoint.glob("*.safetensors"))
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."
    renamed = {
        name.replace("model.", prefix, 1).replace("lm_head.", head): weight
        for name, weight in load_file(file).items()
    }
    save_file({**renamed, "model.rotary_emb.inv_freq": np.ones(4)}, file)
    found = adapt(checkpoint, settings).state_dict
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(to_array(weight), to_array(found[name]))


def test_a_copy_of_a_tied_head_is_left_out(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    file = next(checkpoint.glob("*.safetensors"))
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, file)
    adapted = adapt(checkpoint, settings_of(SETTINGS[0]))
    assert "language_model.lm_head.weight" not in adapted.state_dict
