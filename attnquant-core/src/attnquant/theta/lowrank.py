"""Low-rank terms: the best approximation of a matrix, exactly or by sampling its range.

Where the rank asked for is small beside the matrix, its range is sampled (Halko,
Martinsson and Tropp, 2011): a few products with a thin random block, whose columns are
kept from growing alike in between, and a small eigenproblem at the end. Otherwise the
Gram matrix of the shorter side is diagonalised. The random block has a fixed seed, so
that the same matrix gives the same factors in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import lu

from attnquant.theta.dtypes import Array, widen


class Factors(NamedTuple):
    """``U [out, r]``, ``s [r]``, ``V [r, in]``."""

    U: Array
    s: Array
    V: Array


class Fit(NamedTuple):
    """A base ``W0 [out, in]`` and the factors of each layer around it, as stored.

    Without factors the base stands for each of its layers: for one, whose matrix it is,
    or at rank 0 for several.
    """

    base: Array
    factors: tuple[Factors, ...]


_SEED = 0
_OVERSAMPLING = 10
"""Columns that the sampled block has beyond the rank asked for."""

_POWER_STEPS = 4
"""Extra products with the matrix and its transpose. With four, the error at ranks 16
and 64 of a real model's residuals is within 1% of the smallest; with three, 1.5%."""

_SAMPLED_SHARE = 0.4
"""The block's width, relative to the shorter side, up to which sampling is faster."""

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


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


def fit_plain(matrices: Sequence[Array], rank: int, dtype: np.dtype[Any]) -> Fit:
    """Fit a base and factors by the plain method, `mean-svd`.

    Args:
        matrices: The layers' weights ``[out, in]``.
        rank: r, at most ``min(out, in)``; at 0 there is the base alone.
        dtype: Storage dtype.
    """
    base = mean_base(matrices, dtype)
    if not rank:
        return Fit(base, ())
    # Against the base as stored: the factors make up for its rounding too.
    stored = widen(base)
    return Fit(
        base,
        tuple(
            truncated_svd(widen(matrix) - stored, rank, dtype) for matrix in matrices
        ),
    )


def plain_gains(matrices: Sequence[Array]) -> Float64:
    """Return what each rank takes from the squared error of the plain method.

    Args:
        matrices: The layers' weights ``[out, in]``.

    Returns:
        ``[min(out, in)]``, falling: the entry k is what rank k + 1 takes from the sum
        over the layers of ``||W - W_eff||²`` that rank k leaves. Their sum is the error
        of the base alone. Rounding to a storage dtype is left out.
    """
    exact = [np.asarray(matrix, dtype=np.float64) for matrix in matrices]
    mean = np.mean(exact, axis=0)
    gains = np.zeros(min(mean.shape))
    for matrix in exact:
        residual = matrix - mean
        wide = residual if residual.shape[0] <= residual.shape[1] else residual.T
        gains += falling(np.linalg.eigvalsh(wide @ wide.T))
    return gains


def falling(eigenvalues: Float64) -> Float64:
    """Return rising eigenvalues of a Gram matrix in falling order, none below 0."""
    return np.maximum(eigenvalues[::-1], 0.0)


def truncated_svd(residual: Float32, rank: int, dtype: np.dtype[Any]) -> Factors:
    """Return the best rank-r approximation of a matrix (Eckart and Young, 1936).

    The singular vectors of the shorter side are eigenvectors of its Gram matrix,
    formed in float64; the others follow by one product. Squaring the condition number
    only blurs directions below 1e-8 of the largest, far under the resolution of
    float32. For a small rank the matrix is first projected to a sample of its range.

    Args:
        residual: ``[out, in]``.
        rank: r, at most ``min(out, in)``.
        dtype: Storage dtype of the factors.

    Returns:
        Orthonormal columns U and rows V, and s in falling order; the entry of
        largest magnitude in each column of U is positive, so that signs are the same
        on every machine.
    """
    if is_sampled(rank, residual.shape):
        tall = residual.shape[0] > residual.shape[1]
        # The shorter side's directions are the ones sampled: their block is smaller.
        wide = residual.T if tall else residual
        space = _range_sample(wide, rank)
        left, s, right = _gram_svd((space.T @ wide).astype(np.float64), rank)
        left = space @ left
        if tall:
            left, right = right.T, left.T
    else:
        left, s, right = _gram_svd(residual.astype(np.float64), rank)
    return signed_factors(left, s, right, dtype)


def is_sampled(rank: int, shape: tuple[int, ...]) -> bool:
    """Return whether the range of a matrix is sampled to find its r strongest parts.

    Args:
        rank: r.
        shape: ``(out, in)``.
    """
    return rank + _OVERSAMPLING <= _SAMPLED_SHARE * min(shape)


def sample_width(rank: int) -> int:
    """Return the width of the block with which r directions are sampled."""
    return rank + _OVERSAMPLING


def random_block(rows: int, width: int) -> Float32:
    """Return normally distributed numbers ``[rows, width]``, the same every time."""
    generator = np.random.default_rng(_SEED)
    return generator.standard_normal((rows, width), dtype=np.float32)


def signed_factors(
    left: Array, s: Array, right: Array, dtype: np.dtype[Any]
) -> Factors:
    """Fix the sign of each direction, and round to the storage dtype.

    Args:
        left: ``[out, r]``; the entry of largest magnitude in each column is made
            positive.
        s: ``[r]``.
        right: ``[r, in]``.
        dtype: Storage dtype.
    """
    pivots = left[np.abs(left).argmax(axis=0), np.arange(left.shape[1])]
    signs = np.where(pivots < 0, -1.0, 1.0).astype(left.dtype)
    return Factors(
        U=(left * signs).astype(np.float32).astype(dtype),
        s=s.astype(np.float32).astype(dtype),
        V=(right * signs[:, None]).astype(np.float32).astype(dtype),
    )


def _range_sample(matrix: Float32, rank: int) -> Float32:
    """Return orthonormal columns that all but span the r strongest directions."""
    block = matrix @ random_block(matrix.shape[1], sample_width(rank))
    for _ in range(_POWER_STEPS):
        block = matrix @ (matrix.T @ independent(block))
    return orthonormal(block)


def independent(block: Array) -> Array:
    """Return columns that span a thin block's, far from dependent, if not orthogonal.

    They are L of an LU factorisation with pivots (Li et al., 2017): of full rank
    whatever the block is, and found in a tenth of QR's time.
    """
    return np.asarray(lu(block, permute_l=True, check_finite=False)[0])


def orthonormal(block: Array) -> Array:
    """Return orthonormal columns that span a thin block's columns."""
    return np.linalg.qr(block)[0]


def _gram_svd(wide: Float64, rank: int) -> tuple[Float64, Float64, Float64]:
    out_dim, in_dim = wide.shape
    if out_dim <= in_dim:
        left = _top_eigenvectors(wide @ wide.T, rank)
        scaled = left.T @ wide
        s = np.linalg.norm(scaled, axis=1)
        return left, s, scaled / nonzero(s)[:, None]
    right = _top_eigenvectors(wide.T @ wide, rank).T
    scaled = wide @ right.T
    s = np.linalg.norm(scaled, axis=0)
    return scaled / nonzero(s), s, right


def apply_factors(base: Array, factors: Factors | None) -> Float32:
    """Return ``W_eff = W0 + U · diag(s) · V`` in float32, summed in float64."""
    if factors is None:
        return widen(base)
    left, s, right = (np.asarray(f, dtype=np.float64) for f in factors)
    low_rank = (left * s) @ right
    return (np.asarray(base, dtype=np.float64) + low_rank).astype(np.float32)


def _top_eigenvectors(gram: Float64, rank: int) -> Any:
    # eigh sorts in rising order.
    return np.linalg.eigh(gram)[1][:, : -rank - 1 : -1]


def nonzero(s: Float64) -> Float64:
    """Return lengths that can be divided by: one in place of zero."""
    return np.where(s > 0, s, 1.0)
