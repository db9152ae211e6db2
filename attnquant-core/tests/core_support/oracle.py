"""The plain method in float64, slow and plain: `np.linalg.svd` of ``W - mean``."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from core_support.tiny import SHAPES, Weights, weight_name

Float64 = npt.NDArray[np.float64]


def bands_of(num_layers: int, shared_blocks: int) -> list[range]:
    """Return the layers of each band: from ``ceil(b L / G)`` up to the next band's."""
    starts = [
        math.ceil(band * num_layers / shared_blocks)
        for band in range(shared_blocks + 1)
    ]
    return [range(*pair) for pair in pairwise(starts)]


def effective_weights(
    weights: Weights, num_layers: int, shared_blocks: int, rank: int
) -> dict[str, Float64]:
    """Return every projection's W_eff by canonical name."""
    result = {}
    for family in SHAPES:
        for band in bands_of(num_layers, shared_blocks):
            names = [weight_name(layer, family) for layer in band]
            exact = [weights[name].astype(np.float64) for name in names]
            mean = np.mean(exact, axis=0)
            for name, matrix in zip(names, exact, strict=True):
                result[name] = mean + best_approximation(matrix - mean, rank)
    return result


def best_approximation(matrix: Float64, rank: int) -> Float64:
    """Return the best approximation of a rank (Eckart and Young, 1936)."""
    left, s, right = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray((left[:, :rank] * s[:rank]) @ right[:rank])


def relative_error(exact: Float64, approximation: Float64) -> float:
    """Return ``||exact - approximation||_F / ||exact||_F``."""
    return float(np.linalg.norm(exact - approximation) / np.linalg.norm(exact))
