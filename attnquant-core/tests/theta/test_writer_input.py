"""Planning and writing a bundle: what is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.errors import CheckpointError, SettingError
from attnquant.theta.grouping import uniform
from attnquant.theta.prefix_map import PrefixMap
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan, write_tiny_bundle
from core_support.tiny import (
    FULL_RANK,
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
    write_tiny_checkpoint,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("shard_bytes", [0, -1])
def test_a_shard_size_that_is_not_positive_is_refused(
    model: Path, shard_bytes: int
) -> None:
    with pytest.raises(SettingError, match="shard_bytes: expected a positive"):
        write_bundle(plan(model), model.parent / "bundle", shard_bytes=shard_bytes)
    assert [model] == list(model.parent.iterdir())


@pytest.mark.parametrize("rank", [0, -1, True, False, 2.0, "2", FULL_RANK + 1])
@pytest.mark.parametrize("blocks", [2, 4], ids=["shared", "passthrough"])
def test_a_rank_out_of_bounds_is_refused(
    model: Path, rank: object, blocks: int
) -> None:
    with pytest.raises(SettingError) as caught:
        plan(model, blocks=blocks, rank=rank)
    assert caught.value.subject == "lora_rank"
    assert caught.value.found == repr(rank)


@pytest.mark.parametrize("blocks", [0, -1, 5, True, 2.0, "2", None])
def test_shared_blocks_out_of_bounds_are_refused(model: Path, blocks: object) -> None:
    with pytest.raises(SettingError) as caught:
        plan(model, blocks=blocks)
    assert caught.value.subject == "shared_blocks"
    assert caught.value.found == repr(blocks)


def test_another_storage_dtype_is_refused(model: Path) -> None:
    with pytest.raises(SettingError, match="dtype: expected one of float32, bfloat16"):
        plan(model, dtype="float16")


def test_a_checkpoint_that_is_a_bundle_is_refused(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "bundle")
    assert caught.value.subject == str(tmp_path / "bundle")
    assert caught.value.expected == "a standard checkpoint"
    assert caught.value.found == "a theta bundle"


def test_a_tensor_that_no_prefix_maps_is_named(model: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan(model, prefix_map=PrefixMap({"model.layers.": "layers."}))
    assert caught.value.subject == "model.embed_tokens.weight"


def test_a_config_with_more_layers_than_tensors_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_weights(3), tiny_config(4))
    with pytest.raises(CheckpointError) as caught:
        plan(model, grouping=uniform)
    assert caught.value.subject == weight_name(3, "q_proj")
    assert caught.value.found == "no such tensor"
