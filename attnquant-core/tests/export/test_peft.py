"""`export --to peft`: a base and a LoRA on it that together are the bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from attnquant.errors import BundleError
from attnquant.export.dense import export_dense
from attnquant.export.peft import export_peft
from attnquant.theta.bundle import Bundle
from attnquant.theta.prefix_map import PrefixMap
from core_support.tiny import (
    SHAPES,
    assert_same_bits,
    read_json,
    read_weights,
    weight_name,
)


def test_base_plus_adapter_is_the_dense_export(
    shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    export_peft(shared, prefix_map, tmp_path / "peft")
    export_dense(shared, prefix_map, tmp_path / "dense", dtype="float32")
    merged = read_weights(tmp_path / "peft/base")
    adapter = load_file(tmp_path / "peft/adapter/adapter_model.safetensors")
    config = read_json(tmp_path / "peft/adapter/adapter_config.json")
    for module in config["target_modules"]:
        a = adapter.pop(f"base_model.model.{module}.lora_A.weight").astype(np.float64)
        b = adapter.pop(f"base_model.model.{module}.lora_B.weight").astype(np.float64)
        rank = config["rank_pattern"][module]
        assert (a.shape[0], b.shape[1]) == (rank, rank)
        scale = config["alpha_pattern"][module] / rank
        wide = merged[f"{module}.weight"].astype(np.float64) + scale * (b @ a)
        merged[f"{module}.weight"] = wide.astype(np.float32)
    assert adapter == {}
    dense = read_weights(tmp_path / "dense")
    assert sorted(dense) == sorted(merged)
    for name, array in dense.items():
        np.testing.assert_allclose(merged[name], array, rtol=1e-6, atol=1e-6)


def test_layers_of_a_band_have_its_base_bit_for_bit(
    shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    export_peft(shared, prefix_map, tmp_path / "peft")
    theta = read_weights(shared.checkpoint.path)
    base = read_weights(tmp_path / "peft/base")
    for layer in range(5):
        for family in SHAPES:
            expected = {"": theta[f"W0.{layer * 3 // 5}.{family}"]}
            found = {"": base["model." + weight_name(layer, family)]}
            assert_same_bits(expected, found)


def test_a_layer_with_a_base_of_its_own_is_not_adapted(
    shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    export_peft(shared, prefix_map, tmp_path / "peft")
    config = read_json(tmp_path / "peft/adapter/adapter_config.json")
    layers = {module.split(".")[2] for module in config["target_modules"]}
    assert layers == {"0", "1", "2", "3"}
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert config["base_model_name_or_path"] == "base"


def test_without_low_rank_terms_there_is_no_adapter(
    passthrough: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match="expected low-rank terms") as caught:
        export_peft(passthrough, prefix_map, tmp_path / "peft")
    assert caught.value.hint == "Export it with `--to dense`."
    assert not (tmp_path / "peft").exists()
