"""Pieces of decoders in numpy, for references that models are compared with.

They share no code with what serves: plain formulas in the dtype of their arguments, one
sequence at a time, without batching. `T` is a number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def gelu_tanh(x: Array) -> Array:
    """Return the GELU's tanh form (Hendrycks and Gimpel, arXiv 1606.08415)."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return np.asarray(0.5 * x * (1.0 + np.tanh(inner)))


def silu(x: Array) -> Array:
    """Return ``x * sigmoid(x)``."""
    return np.asarray(x / (1.0 + np.exp(-x)))


def softmax(scores: Array) -> Array:
    """Softmax over the last axis, in place: long prompts make large scores."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def softcap(x: Array, cap: float | None) -> Array:
    """Return ``cap * tanh(x / cap)``; without a cap, `x` itself."""
    return x if cap is None else np.asarray(np.tanh(x / cap) * cap)


def rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate `[heads, T, head_dim]`: lane j pairs with lane j + head_dim / 2.

    Args:
        x: Queries or keys.
        rotation: Cosine and sine of each position's angles, `[T, head_dim / 2]`.
    """
    cos, sin = rotation
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def causal_mask(start: int, stop: int, window: int | None) -> Array:
    """Return which keys `[0, stop)` the queries `[start, stop)` see, as bool.

    transformers' convention (`masking_utils`): a window of `w` holds `w` tokens, the
    query's own included, that is `query - w < key <= query`.
    """
    query = np.arange(start, stop)[:, None]
    key = np.arange(stop)[None, :]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)


def split_heads(x: Array, heads: int) -> Array:
    """Return `[T, heads * head_dim]` as `[heads, T, head_dim]`."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def mean_svd_weff(matrices: Sequence[Array], rank: int) -> list[Array]:
    """Return the `W_eff` of matrices that share a base, in float64.

    The plain method: `W0` is the mean rounded to float32; the residual `W - W0` is cut
    to its `rank` largest singular triples, and `W_eff = W0 + U diag(s) V`.

    Args:
        matrices: Weights `[out, in]`, all of one shape.
        rank: At least 0.
    """
    wide = [np.asarray(m).astype(np.float64) for m in matrices]
    base = np.mean(wide, axis=0).astype(np.float32).astype(np.float64)
    out: list[Array] = []
    for matrix in wide:
        u, s, v = np.linalg.svd(matrix - base, full_matrices=False)
        out.append(base + (u[:, :rank] * s[:rank]) @ v[:rank])
    return out
