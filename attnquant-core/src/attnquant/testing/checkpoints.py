"""Read Hugging Face checkpoints with numpy alone, bfloat16 included."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

# Importing it registers bfloat16 with numpy, and safetensors then returns it.
import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def read_checkpoint(
    directory: Path,
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return a checkpoint's tensors, in their stored dtypes, and its config.json."""
    weights: dict[str, npt.NDArray[Any]] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        weights.update(load_file(shard))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return weights, config


def digest(weights: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return a sha256 over names, dtypes, shapes and bytes, file layout aside."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        tensor = np.ascontiguousarray(weights[name])
        sha.update(f"{name} {tensor.dtype.name} {tensor.shape}\n".encode())
        sha.update(tensor.view(np.uint8).data)
    return sha.hexdigest()
