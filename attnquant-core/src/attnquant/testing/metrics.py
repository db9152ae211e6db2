"""How far two models' logits are apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Comparison(NamedTuple):
    """Worst rows of a comparison; the divergence in nats."""

    cosine_distance: float
    kl: float


def compare_logits(reference: Array, candidate: Array) -> Comparison:
    """Compare logits ``[rows, vocabulary]`` row by row.

    Args:
        reference: What is right.
        candidate: What is looked at.
    """
    return Comparison(
        cosine_distance(reference, candidate), kl_divergence(reference, candidate)
    )


def cosine_distance(a: Array, b: Array) -> float:
    """Return the worst row's ``1 - cos(a, b)``; rows are the last axis.

    Computed as ``|â - b̂|² / 2`` in float64, which keeps its digits where ``1 - a·b``
    would cancel.
    """
    apart = _unit_rows(a) - _unit_rows(b)
    return float(np.max(np.sum(apart * apart, axis=-1)) / 2.0)


def kl_divergence(p_logits: Array, q_logits: Array) -> float:
    """Return the worst row's ``KL(softmax(p) || softmax(q))`` in nats, in float64.

    Summed as ``p log(p/q) - p + q``, each term of which is at least 0.
    """
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    p, q = np.exp(log_p), np.exp(log_q)
    return float(np.max(np.sum(p * (log_p - log_q) - p + q, axis=-1)))


def _unit_rows(x: Array) -> Array:
    rows = np.atleast_2d(np.asarray(x, dtype=np.float64))
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def _log_softmax(x: Array) -> Array:
    rows = np.atleast_2d(np.asarray(x, dtype=np.float64))
    shifted = rows - rows.max(axis=-1, keepdims=True)
    total = np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return np.asarray(shifted - total)
