"""Checkpoints: what is refused, and that the message names the file or tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attnquant.errors import CheckpointError
from attnquant.theta.checkpoint import open_checkpoint, read_header
from core_support.tiny import (
    INDEX,
    edit_json,
    read_json,
    write_tiny_checkpoint,
)

FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
NAME = "model.embed_tokens.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "sharded", shards=3)


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    error = caught.value
    assert error.subject in str(error)
    assert f"expected {error.expected}" in str(error)
    assert f"found {error.found}" in str(error)
    assert "\n" not in str(error)
    return error


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    error = refused(tmp_path / "absent")
    assert error.subject == str(tmp_path / "absent")
    assert "a checkpoint directory" in error.expected
    assert error.found == "nothing"


def test_a_file_in_place_of_a_directory(single: Path) -> None:
    assert refused(single / "config.json").found == "a file"


def test_a_missing_config(single: Path) -> None:
    (single / "config.json").unlink()
    error = refused(single)
    assert error.subject == str(single / "config.json")
    assert (error.expected, error.found) == ("a JSON file", "nothing")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"not JSON", b"\xff\xfe{}", b"[" * 10**5],
    ids=["empty", "cut", "prose", "UTF-16", "deep"],
)
def test_a_config_that_is_not_json(single: Path, content: bytes) -> None:
    (single / "config.json").write_bytes(content)
    error = refused(single)
    assert error.subject == str(single / "config.json")
    assert error.expected == "a JSON file"


@pytest.mark.parametrize(
    ("content", "kind"), [("[]", "list"), ("3", "int"), ("null", "NoneType")]
)
def test_a_config_that_is_no_object(single: Path, content: str, kind: str) -> None:
    (single / "config.json").write_text(content)
    error = refused(single)
    assert error.subject == str(single / "config.json")
    assert (error.expected, error.found) == ("a JSON object", kind)


@pytest.mark.parametrize("value", [None, [], "TinyForCausalLM", [3], {}])
def test_a_config_without_architectures(single: Path, value: object) -> None:
    edit_json(single / "config.json", ["architectures"], value)
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(single).architecture
    assert caught.value.subject == str(single / "config.json")
    assert "architectures" in caught.value.expected


@pytest.mark.parametrize("value", [None, 0, -1, True, 4.0, "4"])
def test_a_config_without_a_number_of_layers(single: Path, value: object) -> None:
    edit_json(single / "config.json", ["num_hidden_layers"], value)
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(single).num_layers
    assert caught.value.subject == str(single / "config.json")
    assert caught.value.expected == '"num_hidden_layers", a positive integer'


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").unlink()
    error = refused(single)
    assert (error.subject, error.found) == (str(single), "none")
    assert "safetensors" in error.expected


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_truncated_file(single: Path, size: int) -> None:
    file = single / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    error = refused(single)
    assert error.subject == str(file)
    assert error.expected == "a whole safetensors file"


def test_a_truncated_shard(sharded: Path) -> None:
    file = sharded / SECOND
    file.write_bytes(file.read_bytes()[:-1])
    assert refused(sharded).subject == str(file)


def test_a_file_of_another_format(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"GGUF" + bytes(1000))
    error = refused(single)
    assert error.subject == str(single / "model.safetensors")
    assert error.expected == "a whole safetensors file"


def test_a_directory_named_like_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").mkdir()
    assert refused(single).subject == str(single / "model.safetensors")


def test_a_file_that_is_damaged_after_it_was_opened(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    (single / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.tensors[NAME]
    assert caught.value.subject == str(single / "model.safetensors")


def test_a_quantised_dtype_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = b'{"w":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert caught.value.subject == "x.safetensors: w"
    assert caught.value.found == "F8_E4M3"
    assert "Quantised" in caught.value.hint


def test_an_index_that_names_an_absent_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    error = refused(sharded)
    assert error.subject == str(sharded / SECOND)
    assert INDEX in error.expected
    assert error.found == "no such file"


@pytest.mark.parametrize(
    "file",
    ["../single/model.safetensors", "/etc/passwd", "..", "sub/model.safetensors", 3],
)
def test_an_index_that_leads_out_of_the_directory(
    single: Path, sharded: Path, file: object
) -> None:
    shutil.copytree(single, sharded / "sub")
    edit_json(sharded / INDEX, ["weight_map", NAME], file)
    error = refused(sharded)
    assert error.subject == str(sharded / str(file))
    assert error.found == "no such file"


def test_an_index_that_places_a_tensor_in_the_wrong_shard(sharded: Path) -> None:
    edit_json(sharded / INDEX, ["weight_map", NAME], SECOND)
    error = refused(sharded)
    assert error.subject == NAME
    assert SECOND in error.expected
    assert error.found == f"it in {FIRST}"


def test_an_index_that_lists_a_tensor_no_shard_has(sharded: Path) -> None:
    edit_json(sharded / INDEX, ["weight_map", "ghost"], SECOND)
    error = refused(sharded)
    assert (error.subject, error.found) == ("ghost", "none")


def test_an_index_that_leaves_a_tensor_out(sharded: Path) -> None:
    weight_map = read_json(sharded / INDEX)["weight_map"]
    del weight_map[NAME]
    edit_json(sharded / INDEX, ["weight_map"], weight_map)
    error = refused(sharded)
    assert error.subject == NAME
    assert error.found == f"one more in {FIRST}"


@pytest.mark.parametrize("value", [None, {}, [], "x"])
def test_an_index_without_a_weight_map(sharded: Path, value: object) -> None:
    edit_json(sharded / INDEX, ["weight_map"], value)
    error = refused(sharded)
    assert error.subject == str(sharded / INDEX)
    assert "weight_map" in error.expected


def test_an_index_that_is_not_json(sharded: Path) -> None:
    (sharded / INDEX).write_text("{")
    assert refused(sharded).subject == str(sharded / INDEX)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    error = refused(sharded)
    assert error.subject == str(sharded / INDEX)
    assert FIRST in error.found
    assert SECOND in error.found


def test_one_shard_with_neither_index_nor_the_others(sharded: Path) -> None:
    for file in (INDEX, SECOND, "model-00003-of-00003.safetensors"):
        (sharded / file).unlink()
    error = refused(sharded)
    assert error.subject == str(sharded / INDEX)
    assert error.found == f"none, but {FIRST}"


def test_a_single_file_beside_an_index(sharded: Path) -> None:
    save_file({"x": np.ones(3)}, sharded / "model.safetensors")
    error = refused(sharded)
    assert error.subject == str(sharded / "model.safetensors")
    assert INDEX in error.expected
    assert "Remove it" in error.hint


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    shard = load_file(sharded / SECOND)
    save_file(shard | load_file(sharded / FIRST), sharded / SECOND)
    error = refused(sharded)
    assert error.subject in load_file(sharded / FIRST)
    assert error.expected == "one tensor of this name"
    assert error.found == f"two, in {FIRST} and in {SECOND}"
