"""The theta bundle: its block survives JSON, and its tensors are what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from attnquant.errors import BundleError, CheckpointError
from attnquant.theta import UNNAMED, NoBase, make_layout
from attnquant.theta.bundle import (
    FORMAT_VERSION,
    BundleInfo,
    Source,
    check_tensors,
    open_bundle,
    parse_block,
)
from attnquant.theta.decompose import projection_shapes
from core_support.bundles import write_tiny_bundle
from core_support.tiny import edit_json, tiny_weights, write_tiny_checkpoint


def group_of(layer: int, family: str) -> str | NoBase:
    if (layer, family) == (0, "v_proj"):
        return NoBase.DENSE
    return f"kind{layer % 2}" if family == "q_proj" else UNNAMED


def info_of(num_layers: int, blocks: int, rank: int, tie: str) -> BundleInfo:
    weights = tiny_weights(num_layers)
    layout = make_layout(
        projection_shapes(weights),
        num_layers=num_layers,
        shared_blocks=blocks,
        lora_rank=rank,
        tie_families=tie,
        grouping=group_of,
    )
    theta = layout.tensors()
    kept = {
        name: (str(array.dtype), array.shape)
        for name, array in weights.items()
        if not name.endswith("_proj.weight")
        or layout.base_of(int(name.split(".")[1]), name.split(".")[3]) is None
    }
    assert not set(theta) & set(kept)
    return BundleInfo(
        method="mean-svd",
        layout=layout,
        dtype="bfloat16",
        kept=kept,
        source=Source("tiny", {"model.safetensors": "sha256:00"}),
        error={"q_proj": 0.25},
        created_by={"attnquant-core": "0.1.0"},
    )


@given(
    num_layers=st.integers(1, 8),
    blocks=st.integers(1, 8),
    rank=st.integers(1, 12),
    tie=st.sampled_from(["all", "attn"]),
)
@settings(max_examples=40)
def test_a_block_survives_json(
    num_layers: int, blocks: int, rank: int, tie: str
) -> None:
    info = info_of(num_layers, min(blocks, num_layers), rank, tie)
    assert info == parse_block(json.loads(json.dumps(info.to_json())))


def test_a_block_holds_what_the_design_lists() -> None:
    block = info_of(4, 2, 3, "all").to_json()
    assert block["format_version"] == FORMAT_VERSION
    assert (block["shared_blocks"], block["lora_rank"]) == (2, 3)
    assert block["layer_to_band"]["q_proj"] == [0, 0, 1, 1]
    assert block["groups"]["q_proj"] == ["kind0", "kind1", "kind0", "kind1"]
    assert block["groups"]["v_proj"] == [None, "", "", ""]
    # No two layers share a q_proj here: each group has one in each band.
    ranks = block["ranks"]
    assert (ranks["W0.0.kind0.q_proj"], ranks["W0.0.k_proj"]) == (0, 3)
    assert block["source"] == {
        "name": "tiny",
        "shards": {"model.safetensors": "sha256:00"},
    }
    assert (block["method"], block["dtype"]) == ("mean-svd", "bfloat16")
    assert block["error"] == {"q_proj": 0.25}


def test_a_block_predicts_every_tensor() -> None:
    tensors = info_of(4, 2, 3, "attn").tensors()
    assert tensors["W0.0.k_proj"] == ("bfloat16", (8, 12))
    assert tensors["layers.1.k_proj.s"] == ("bfloat16", (3,))
    assert tensors["norm.weight"] == ("float32", (12,))
    assert tensors["layers.0.self_attn.v_proj.weight"] == ("float32", (8, 12))


def test_a_bundle_that_was_written_opens(tmp_path: Path) -> None:
    written = write_tiny_bundle(tmp_path)
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.checkpoint.is_bundle
    assert written.info == bundle.info


def test_a_standard_checkpoint_is_no_bundle(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert caught.value.subject == str(path / "config.json")
    assert "a theta bundle" in caught.value.expected
    assert caught.value.found == "none"
    assert "attnquant decompose" in caught.value.hint


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path / "absent")):
        open_bundle(tmp_path / "absent")


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 99])
def test_a_newer_format_is_refused_with_a_hint(tmp_path: Path, version: int) -> None:
    write_tiny_bundle(tmp_path)
    config = tmp_path / "bundle" / "config.json"
    edit_json(config, ["attnquant", "format_version"], version)
    with pytest.raises(BundleError) as caught:
        open_bundle(tmp_path / "bundle")
    assert caught.value.subject == f"{config}: attnquant.format_version"
    assert caught.value.expected == f"a format from 1 to {FORMAT_VERSION}"
    assert caught.value.found == str(version)
    assert "Upgrade attnquant-core" in caught.value.hint


def test_a_config_with_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    config = tmp_path / "bundle" / "config.json"
    edit_json(config, ["num_hidden_layers"], 6)
    with pytest.raises(BundleError) as caught:
        open_bundle(tmp_path / "bundle")
    assert caught.value.subject == f"{config}: num_hidden_layers"
    assert (caught.value.expected[0], caught.value.found) == ("4", "6")


EXPECTED = {"a": ("float32", (2, 3)), "b": ("bfloat16", (4,))}


def test_tensors_as_predicted_pass() -> None:
    check_tensors(EXPECTED, dict(EXPECTED))


@pytest.mark.parametrize(
    ("found", "subject", "expected", "was"),
    [
        ({"a": EXPECTED["a"]}, "b", "bfloat16 [4]", "no such tensor"),
        (
            EXPECTED | {"c": ("float32", (1,))},
            "c",
            "no such tensor",
            "one that the block lacks",
        ),
        (
            EXPECTED | {"a": ("float32", (3, 2))},
            "a",
            "float32 [2, 3]",
            "float32 [3, 2]",
        ),
        (
            EXPECTED | {"b": ("float32", (4,))},
            "b",
            "bfloat16 [4]",
            "float32 [4]",
        ),
    ],
    ids=["missing", "surplus", "shape", "dtype"],
)
def test_a_tensor_unlike_the_prediction_is_named(
    found: dict, subject: str, expected: str, was: str
) -> None:
    with pytest.raises(BundleError) as caught:
        check_tensors(EXPECTED, found)
    error = caught.value
    assert (subject, expected, was) == (error.subject, error.expected, error.found)


@pytest.mark.parametrize("name", ["W0.1.k_proj", "layers.3.up_proj.s", "norm.weight"])
@pytest.mark.parametrize("change", ["missing", "shape", "dtype", "renamed"])
def test_a_damaged_bundle_does_not_open(tmp_path: Path, name: str, change: str) -> None:
    write_tiny_bundle(tmp_path)
    bundle = tmp_path / "bundle"
    file = bundle / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensor = tensors.pop(name)
    if change == "shape":
        tensors[name] = np.concatenate([tensor, tensor])
    elif change == "dtype":
        tensors[name] = tensor.astype(np.float16)
    elif change == "renamed":
        tensors["other"] = tensor
    save_file(tensors, file)
    # The index agrees with the file: only the block knows.
    edit_json(
        bundle / "model.safetensors.index.json",
        ["weight_map"],
        dict.fromkeys(tensors, file.name),
    )
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert caught.value.subject == name
    assert caught.value.expected.startswith("float32 [")


@pytest.mark.parametrize("name", ["W0.7.q_proj", "layers.3.up_proj.W", "extra"])
def test_a_surplus_tensor_does_not_go_unseen(tmp_path: Path, name: str) -> None:
    write_tiny_bundle(tmp_path)
    bundle = tmp_path / "bundle"
    file = bundle / "model-00001-of-00001.safetensors"
    tensors = load_file(file) | {name: np.ones(3, np.float32)}
    save_file(tensors, file)
    edit_json(
        bundle / "model.safetensors.index.json",
        ["weight_map"],
        dict.fromkeys(tensors, file.name),
    )
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert (caught.value.subject, caught.value.expected) == (name, "no such tensor")
