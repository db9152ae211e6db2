"""The plain method (`mean-svd`) for one base: mean of the band, truncated SVD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnquant.theta.dtypes import Array, widen


class Factors(NamedTuple):
    """``U [out, r]``, ``s [r]``, ``V [r, in]``."""

    U: Array
    s: Array
    V: Array


def mean_base(matrices: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Return the mean of matrices of one shape, summed in float64.

    The mean of a single matrix is that matrix, bit for bit where `dtype` holds it.
    """
    if len(matrices) == 1:
        return matrices[0].astype(dtype)
    total = np.zeros(matrices[0].shape, dtype=np.float64)
    for matrix in matrices:
        total += widen(matrix)
    # Two roundings (float64 to float32 to bfloat16) where one would do could be off
    # by one unit at a tie; float32 carries 16 more bits, so ties are all but absent.
    return (total / len(matrices)).astype(np.float32).astype(dtype)


def truncated_svd(
    residual: npt.NDArray[np.float32], rank: int, dtype: np.dtype[Any]
) -> Factors:
    """Return the best rank-r approximation of a matrix (Eckart and Young, 1936).

    The singular vectors of the shorter side are eigenvectors of its Gram matrix,
    formed in float64; the others follow by one product. That is an order faster than
    a full SVD. Squaring the condition number only blurs directions below 1e-8 of the
    largest, far under the resolution of float32.

    Args:
        residual: ``[out, in]``.
        rank: r, at most ``min(out, in)``.
        dtype: Storage dtype of the factors.

    Returns:
        Orthonormal columns U and rows V, and s in falling order; the entry of
        largest magnitude in each column of U is positive, so that signs are the same
        on every machine.
    """
    out_dim, in_dim = residual.shape
    wide = residual.astype(np.float64)
    if out_dim <= in_dim:
        left = _top_eigenvectors(wide @ wide.T, rank)
        scaled = left.T @ wide
        s = np.linalg.norm(scaled, axis=1)
        right = scaled / _nonzero(s)[:, None]
    else:
        right = _top_eigenvectors(wide.T @ wide, rank).T
        scaled = wide @ right.T
        s = np.linalg.norm(scaled, axis=0)
        left = scaled / _nonzero(s)
    pivots = left[np.abs(left).argmax(axis=0), np.arange(rank)]
    signs = np.where(pivots < 0, -1.0, 1.0)
    return Factors(
        U=(left * signs).astype(np.float32).astype(dtype),
        s=s.astype(np.float32).astype(dtype),
        V=(right * signs[:, None]).astype(np.float32).astype(dtype),
    )


def apply_factors(base: Array, factors: Factors | None) -> npt.NDArray[np.float32]:
    """Return ``W_eff = W0 + U · diag(s) · V`` in float32, summed in float64."""
    if factors is None:
        return widen(base)
    left, s, right = (np.asarray(f, dtype=np.float64) for f in factors)
    low_rank = (left * s) @ right
    return (np.asarray(base, dtype=np.float64) + low_rank).astype(np.float32)


def _top_eigenvectors(gram: npt.NDArray[np.float64], rank: int) -> Any:
    # eigh sorts in rising order.
    return np.linalg.eigh(gram)[1][:, : -rank - 1 : -1]


def _nonzero(s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(s > 0, s, 1.0)
