"""Random tensors for tiny models, the same bits on every machine."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attnquant.theta.names import parse_projection
from attnquant.theta.prefix_map import PrefixMap

Float64 = npt.NDArray[np.float64]

_DIRECTIONS = 6
"""In how many directions a layer's matrix differs from what all layers share."""


class TensorMaker:
    """Random tensors by elementwise arithmetic that IEEE 754 fixes to the bit.

    `numpy.random.Generator` may change its streams between releases (NEP 19) and BLAS
    sums in an order of its own; raw PCG64 words and ufuncs do neither. A tensor depends
    on the seed, its name and its shape alone.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, shape: tuple[int, ...]) -> Float64:
        """Return values near N(0, 1): four uniform 16-bit parts summed, scaled."""
        sequence = np.random.SeedSequence([self._seed, zlib.crc32(name.encode())])
        words = np.random.PCG64(sequence).random_raw(math.prod(shape))
        parts = words.astype("<u8").view("<u2").reshape(-1, 4).astype(np.int64)
        centred = 2 * parts.sum(axis=1) - 4 * 65535
        # A uniform 16-bit integer has the variance (2**32 - 1) / 12.
        deviation = 2.0 * math.sqrt(4 * (2**32 - 1) / 12)
        return np.asarray(centred.reshape(shape) / deviation)

    def norm(self, name: str, width: int, *, mean: float) -> Float64:
        """Return a norm's weight ``[width]``, off its neutral value everywhere."""
        return mean + 0.25 * self.normal(f"norm {name}", (width,))

    def projection(
        self, path: str, layer: int, shape: tuple[int, int], *, base: str | None = None
    ) -> Float64:
        """Return a layer's matrix: a base all share, and a difference of its own.

        The difference has six well separated directions and a small full-rank rest, so
        that a low rank recovers most of it but never all.

        Args:
            path: What the matrix is, in every layer.
            layer: Which layer.
            shape: ``(out, in)``.
            base: The name that layers with a common base share; by default the path.
        """
        out_features, in_features = shape
        matrix = self.normal(f"base {base or path}", shape)
        for k in range(_DIRECTIONS):
            u = self.normal(f"u{k} {path} {layer}", (out_features, 1))
            v = self.normal(f"v{k} {path} {layer}", (1, in_features))
            matrix += (0.4 * 0.75**k) * (u * v)
        matrix += 0.1 * self.normal(f"rest {path} {layer}", shape)
        return matrix / math.sqrt(in_features)


def random_weights(
    shapes: Mapping[str, tuple[int, ...]],
    prefix_map: PrefixMap,
    *,
    seed: int = 0,
    norm_mean: float = 1.0,
) -> dict[str, npt.NDArray[Any]]:
    """Return a random float32 checkpoint of a model.

    Projections have a base in common and differences of low rank, vectors are norms
    off their neutral value, and all else is small: a stream that starts small beside
    what the layers add keeps greedy text from repeating its last token.

    Args:
        shapes: Each tensor's shape, under the checkpoint's own names.
        prefix_map: The plugin's.
        seed: Of all tensors.
        norm_mean: About what a norm's weights are scattered; 0 where a model stores
            the gain minus one.
    """
    maker = TensorMaker(seed)
    weights = {}
    for name, shape in shapes.items():
        canonical = prefix_map.canonical(name) or name
        if (key := parse_projection(canonical)) is not None:
            out_features, in_features = shape
            matrix = (out_features, in_features)
            base = f"{key.family} {matrix}"
            made = maker.projection(key.family, key.layer, matrix, base=base)
        elif len(shape) == 1:
            made = maker.norm(name, shape[0], mean=norm_mean)
        else:
            made = 0.05 * maker.normal(name, shape)
        weights[name] = made.astype(np.float32)
    return weights
