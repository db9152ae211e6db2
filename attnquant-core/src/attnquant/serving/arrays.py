"""MAX's weight containers to numpy arrays and back, without copies where possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.graph import Shape
from max.graph.weights import WeightData

from attnquant.serving.pages import ReadOnlyFiles
from attnquant.theta.dtypes import BFLOAT16, Array

_BLOCK = 1 << 20
"""How many numbers are converted at a time."""


def to_array(weight: WeightData) -> Array:
    """Return a weight as a numpy array; bfloat16 as `ml_dtypes.bfloat16`."""
    buffer = weight.to_buffer()
    if buffer.dtype != DType.bfloat16:
        return buffer.to_numpy()
    bits = buffer.view(DType.uint16, tuple(buffer.shape)).to_numpy()
    return bits.view(BFLOAT16)


def to_weight(name: str, array: Array) -> WeightData:
    """Return a numpy array (bfloat16 included) as a MAX weight of that name."""
    array = np.ascontiguousarray(array)
    if array.dtype != BFLOAT16:
        return WeightData.from_numpy(array, name)
    bits = Buffer.from_numpy(array.view(np.uint16))
    buffer = bits.view(DType.bfloat16, array.shape)
    return WeightData(buffer, name, DType.bfloat16, Shape(array.shape))


def cast(weight: WeightData, dtype: DType) -> WeightData:
    """Return a weight in a dtype; what is no floating-point number stays as it is."""
    if weight.dtype == dtype or not weight.dtype.is_float():
        return weight
    target = BFLOAT16 if dtype == DType.bfloat16 else np.dtype(dtype.to_numpy())
    return to_weight(weight.name, _converted(to_array(weight), target))


def _converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """Convert block by block, and give each block's memory back if it is a file's."""
    files = ReadOnlyFiles()
    source = np.ascontiguousarray(array).reshape(-1)
    target = np.empty(source.shape, dtype)
    for start in range(0, source.size, _BLOCK):
        block = source[start : start + _BLOCK]
        target[start : start + _BLOCK] = block
        files.release(block)
    return target.reshape(array.shape)


class WeightArrays(Mapping[str, Array]):
    """Weights by name as numpy arrays, each converted when asked for."""

    def __init__(self, weights: Mapping[str, WeightData]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Array:
        """Convert one weight."""
        return to_array(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        """Iterate over names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Count the weights."""
        return len(self._weights)
