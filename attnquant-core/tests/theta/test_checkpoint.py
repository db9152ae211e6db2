"""Checkpoints: opened lazily, read bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from attnquant.theta.checkpoint import (
    RenamedTensors,
    open_checkpoint,
    read_header,
    sha256,
)
from core_support.tiny import (
    BFLOAT16,
    assert_same_bits,
    bits,
    tiny_config,
    tiny_weights,
    write_checkpoint,
    write_tiny_checkpoint,
)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_read_bit_for_bit(tmp_path: Path, shards: int) -> None:
    weights = tiny_weights(2, dtype=BFLOAT16)
    path = write_checkpoint(
        tmp_path / "model", weights, tiny_config(2), shards=shards, prefix=""
    )
    assert_same_bits(weights, open_checkpoint(path).tensors)


def test_every_bfloat16_is_read_bit_for_bit(tmp_path: Path) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(BFLOAT16)
    path = write_checkpoint(tmp_path / "m", {"every": every}, tiny_config(1), prefix="")
    assert_same_bits({"every": every}, open_checkpoint(path).tensors)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_shapes_and_dtypes_are_known_without_reading(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.ones(shape, dtype)
    save_file({"x": array}, tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors")["x"]
    assert (array.dtype, shape, array.nbytes) == (info.dtype, info.shape, info.nbytes)


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert [path / "weights.safetensors"] == list(open_checkpoint(path).shards)


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", shards=2)
    merged = dict(open_checkpoint(path).tensors)
    for shard in path.glob("*.safetensors"):
        shard.unlink()
    save_file(merged, path / "model.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(
        index.read_text()
        .replace("model-00001-of-00002.", "model.")
        .replace("model-00002-of-00002.", "model.")
    )
    assert_same_bits(merged, open_checkpoint(path).tensors)


def test_weights_of_other_formats_are_no_concern(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", shards=2)
    save_file({"x": np.ones(3)}, path / "consolidated.safetensors")
    assert "x" not in open_checkpoint(path).tensors


def test_tensors_are_listed_sorted_and_counted(tmp_path: Path) -> None:
    tensors = open_checkpoint(write_tiny_checkpoint(tmp_path / "model")).tensors
    assert sorted("model." + name for name in tiny_weights(4)) == list(tensors)
    assert len(tensors) == len(tiny_weights(4))
    with pytest.raises(KeyError):
        tensors["absent"]


def test_renamed_tensors_are_the_same_under_other_names(tmp_path: Path) -> None:
    tensors = open_checkpoint(write_tiny_checkpoint(tmp_path / "model")).tensors
    renamed = RenamedTensors(tensors, {"b": "model.norm.weight"})
    assert (list(renamed), len(renamed)) == (["b"], 1)
    assert_same_bits({"b": tiny_weights(4)["norm.weight"]}, renamed)
    assert renamed.infos["b"].shape == (12,)


def test_a_checkpoint_tells_its_architecture_and_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path / "model"))
    assert checkpoint.architecture == "TinyForCausalLM"
    assert checkpoint.num_layers == 4
    assert not checkpoint.is_bundle


def test_a_nested_text_config_is_the_decoders(tmp_path: Path) -> None:
    config = tiny_config(9, text_config={"num_hidden_layers": 4})
    path = write_checkpoint(tmp_path / "model", tiny_weights(4), config)
    assert open_checkpoint(path).num_layers == 4


def test_a_digest_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"attnquant")
    expected = hashlib.sha256(b"attnquant").hexdigest()
    assert expected == sha256(tmp_path / "x")


@pytest.mark.parametrize("block_bytes", [1, 48, 100, 10**9])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_a_tensor_read_in_rows_is_the_tensor(
    tmp_path: Path, block_bytes: int, dtype: np.dtype
) -> None:
    weights = tiny_weights(1, dtype=dtype)
    path = write_checkpoint(tmp_path / "model", weights, tiny_config(1), prefix="")
    tensors = open_checkpoint(path).tensors
    for name, array in weights.items():
        parts = list(tensors.rows(name, block_bytes))
        assert [row for row, _ in parts] == list(
            np.cumsum([0, *(len(part) for _, part in parts[:-1])])
        )
        assert bits(array) == bits(np.concatenate([part for _, part in parts]))
