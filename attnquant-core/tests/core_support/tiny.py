"""Tiny random models: state dicts and checkpoints, with numpy and safetensors only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]
Weights = dict[str, Array]

ARCHITECTURE = "TinyForCausalLM"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INDEX = "model.safetensors.index.json"
FULL_RANK = 12
"""The largest rank that a projection of a tiny model can have."""

SHAPES = {
    "q_proj": (16, 12),
    "k_proj": (8, 12),
    "v_proj": (8, 12),
    "o_proj": (12, 16),
    "gate_proj": (20, 12),
    "up_proj": (20, 12),
    "down_proj": (12, 20),
}
"""Families in their order, each with its ``(out, in)``."""

MODULES = dict.fromkeys(SHAPES, "self_attn") | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), "mlp"
)


def weight_name(layer: int, family: str) -> str:
    """Return a projection's canonical name."""
    return f"layers.{layer}.{MODULES[family]}.{family}.weight"


def tiny_weights(
    num_layers: int,
    *,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float32,
    shapes: Mapping[str, tuple[int, int]] | None = None,
) -> Weights:
    """Return a decoder's tensors by canonical name, norms and an embedding included."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    weights = {"embed_tokens.weight": draw(6, 12), "norm.weight": draw(12)}
    for layer in range(num_layers):
        weights[f"layers.{layer}.input_layernorm.weight"] = draw(12)
        for family, shape in (shapes or SHAPES).items():
            weights[weight_name(layer, family)] = draw(*shape)
    return weights


def square_weights(num_layers: int, size: int, *, seed: int = 0) -> Weights:
    """Return projections that are all ``[size, size]``, in float32."""
    return tiny_weights(
        num_layers, seed=seed, shapes=dict.fromkeys(SHAPES, (size, size))
    )


def tiny_config(num_layers: int, **changes: Any) -> dict[str, Any]:
    """Return a `config.json`; a change to None leaves the field out."""
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "tiny",
        "num_hidden_layers": num_layers,
        **changes,
    }
    return {name: value for name, value in config.items() if value is not None}


def write_checkpoint(
    path: Path,
    weights: Weights,
    config: Mapping[str, Any],
    *,
    shards: int = 1,
    prefix: str = "model.",
) -> Path:
    """Write a Hugging Face style checkpoint; more than one shard get an index."""
    path.mkdir(parents=True)
    write_json(path / "config.json", config)
    named = {prefix + name: array for name, array in weights.items()}
    if shards == 1:
        save_file(named, path / "model.safetensors")
        return path
    names = list(named)
    parts = {
        f"model-{number:05}-of-{shards:05}.safetensors": names[number - 1 :: shards]
        for number in range(1, shards + 1)
    }
    for file, members in parts.items():
        save_file({name: named[name] for name in members}, path / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    write_json(path / INDEX, {"metadata": {}, "weight_map": weight_map})
    return path


def write_tiny_checkpoint(path: Path, num_layers: int = 4, **options: Any) -> Path:
    """Write a tiny float32 checkpoint of seed 0."""
    return write_checkpoint(
        path, tiny_weights(num_layers), tiny_config(num_layers), **options
    )


def read_weights(path: Path) -> Weights:
    """Return every tensor of a directory, by the names in the files."""
    weights: Weights = {}
    for file in sorted(path.glob("*.safetensors")):
        weights.update(load_file(file))
    return weights


def read_json(path: Path) -> Any:
    """Return a file's JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: object) -> None:
    """Write JSON to a file."""
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_json(path: Path, keys: Sequence[str], value: object) -> None:
    """Set one nested field of a JSON file."""
    content = part = read_json(path)
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    write_json(path, content)


def bits(array: Array) -> tuple[str, tuple[int, ...], bytes]:
    """Return all that two bit-identical arrays have in common."""
    return str(array.dtype), array.shape, array.tobytes()


def assert_same_bits(
    expected: Mapping[str, Array], actual: Mapping[str, Array]
) -> None:
    """Check that two mappings hold the same tensors, bit for bit."""
    assert sorted(expected) == sorted(actual)
    for name, array in expected.items():
        assert bits(array) == bits(actual[name]), name


def finite_bfloat16() -> Array:
    """Return each of the 65280 finite bfloat16 values once, ``[255, 256]``."""
    every = np.arange(2**16, dtype=np.uint16)
    exponent_full = (every & 0x7F80) == 0x7F80
    return every[~exponent_full].view(BFLOAT16).reshape(255, 256)
