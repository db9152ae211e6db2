"""The weighted method for one base: smallest error of outputs, not of weights.

Layers i of one base have weights ``W_i [out, in]`` and inputs of second moment
``C_i [in, in]`` (see `attnquant.theta.statistics`). Sought are a base W0 and, per
layer, ``L_i`` of rank r that minimise

    f = sum_i tr(E_i C_i E_iᵀ),        E_i = W_i - W0 - L_i

the mean square of what changes in the projections' outputs. Given all L_i the best base
is ``W0 = (sum_i A_i C_i)(sum_i C_i)⁻¹`` with ``A_i = W_i - L_i``. Put into f, and with
``S = sum_j C_j``, what remains as a function of one L_i alone is

    tr((W_i - L_i - X_i) P_i (W_i - L_i - X_i)ᵀ) + constant

    X_i = (sum_{j≠i} A_j C_j)(S - C_i)⁻¹    the best base of the other layers
    P_i = C_i - C_i S⁻¹ C_i             the parallel sum of C_i and S - C_i

so the best L_i, *with the base following it*, is ``U Uᵀ (W_i - X_i)`` with U the top r
eigenvectors of ``(W_i - X_i) P_i (W_i - X_i)ᵀ``. Layers take turns at this step, which
is an exact minimiser, so f never rises. It gets further than residuals given the base
and the base given residuals in turn: those stand still at once where the C_i are alike,
since residuals of two layers then point in opposite directions and leave the base where
it is. Two layers are solved outright: f depends on L_1 - L_2 only, a matrix of rank 2r.

No inverse is formed: S and S - C_i are factorised (Cholesky). Where the statistics have
fewer tokens than dimensions C_i is singular; a ridge makes it definite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve, eigh, eigvalsh
from scipy.linalg.blas import ssyrk

from attnquant.theta.dtypes import Array
from attnquant.theta.lowrank import (
    Factors,
    Fit,
    Float32,
    Float64,
    falling,
    independent,
    nonzero,
    random_block,
    sample_width,
    signed_factors,
)

RIDGE = 1e-4
"""What is added to a moment's diagonal, relative to the diagonal's mean."""

SWEEPS = 3
"""How often each layer of more than two has its turn."""

_STALL = 1e-4
"""A sweep that lowers f by a smaller share than this is the last."""

_POWER_STEPS = 3
"""Extra products with ``D·P·Dᵀ`` where the range is sampled."""

_SAMPLED_SHARE = 0.15
"""A sample's width, relative to the shorter side, up to which it pays: these products
cost more than the plain method's, and the spectra fall less."""

_PAIR_SHARE = 0.4
"""The same for two layers, whose products are thin."""

_PAIR_STEPS = 5
"""Their extra products: three left outputs an error up to 3% above the least."""


class Metric:
    """Multiplies thin blocks ``[in, k]`` by C, or by ``C - C·S⁻¹·C``.

    Blocks in float32 are multiplied in float32. That is twice as fast, and enough to
    find directions by: an error of the product moves none that matters, and bases and
    factors are computed in float64 from the directions found.

    Args:
        moment: C ``[in, in]``, definite.
        cholesky: S as `cho_factor` gives it; None for C itself.
    """

    def __init__(
        self, moment: Float64, cholesky: tuple[Float64, bool] | None = None
    ) -> None:
        self._moment = moment
        self._cholesky = cholesky

    @cached_property
    def narrow(self) -> Metric:
        """The same in float32."""
        cholesky = self._cholesky
        return Metric(
            self._moment.astype(np.float32),
            cholesky and (cholesky[0].astype(np.float32), cholesky[1]),
        )

    def __call__(self, block: Array) -> Array:
        """Multiply a block, in the dtype that both are of."""
        product = self._moment @ block
        if self._cholesky is None:
            return product
        solved = cho_solve(self._cholesky, product, check_finite=False)
        return np.asarray(product - self._moment @ solved)


def with_ridge(moment: Float32, ridge: float = RIDGE) -> Float64:
    """Return a moment in float64, its diagonal raised by a share of its mean.

    The ridge stands for a small error of the weights themselves beside that of the
    outputs. A moment that is zero (an input never seen) becomes the identity.
    """
    regular = moment.astype(np.float64)
    level = float(np.trace(regular)) / len(regular)
    regular[np.diag_indices_from(regular)] += ridge * level if level else 1.0
    return regular


def weighted_error(difference: Array, moment: Array) -> float:
    """Return ``tr(E·C·Eᵀ)`` of ``E [out, in]`` and ``C [in, in]``."""
    # In float32, which is twice as fast; the sum over rows in float64.
    product = np.asarray(difference, np.float32) @ np.asarray(moment, np.float32)
    rows = np.einsum("ij,ij->i", product, np.asarray(difference, np.float32))
    return float(rows.sum(dtype=np.float64))


def output_energy(matrix: Array, moment: Array) -> float:
    """Return ``tr(W·C·Wᵀ)``, the mean square of a projection's outputs.

    One triangle of ``WᵀW`` is formed, in float32: half the work of `weighted_error`.
    Not for errors: where they all but avoid C, what is left is rounding, of either
    sign.
    """
    # A row-major W is Wᵀ in the order that BLAS takes without a copy.
    gram = ssyrk(1.0, np.asarray(matrix, np.float32).T, lower=True)
    # The upper triangle is zero, and C is symmetric.
    rows = np.einsum("ij,ij->i", gram.T, np.asarray(moment, np.float32))
    diagonal = np.diagonal(gram).astype(np.float64) @ np.diagonal(moment)
    return float(2 * rows.sum(dtype=np.float64) - diagonal)


def fit_weighted(
    matrices: Sequence[Array],
    moments: Sequence[Float64],
    rank: int,
    dtype: np.dtype[Any],
    *,
    sweeps: int = SWEEPS,
    history: list[float] | None = None,
) -> Fit:
    """Fit a base and factors to layers that share it.

    Args:
        matrices: W_i ``[out, in]``, two or more.
        moments: C_i ``[in, in]``, definite (`with_ridge`).
        rank: r, at most ``min(out, in)``; at 0 there is the base alone.
        dtype: Storage dtype.
        sweeps: How often each layer of more than two has its turn, at most.
        history: Gets f, ridge included and before rounding, after each sweep.
    """
    history = [] if history is None else history
    # Turns are taken in an order of the layers' own, so that the one they come in, and
    # with it the order of sums, changes no bit.
    exact = [np.asarray(matrix, dtype=np.float64) for matrix in matrices]
    sizes = [
        (float(np.linalg.norm(matrix)), float(np.trace(moment)))
        for matrix, moment in zip(exact, moments, strict=True)
    ]
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    exact = [exact[i] for i in order]
    moments = [moments[i] for i in order]
    cholesky = _factorised(_sum(moments))
    if not rank:
        base = _best_base(exact, _no_terms(exact), moments, cholesky)
        return Fit(base.astype(np.float32).astype(dtype), ())
    if len(exact) == 2:  # noqa: PLR2004
        terms, base = _solve_two(exact, moments, cholesky, rank)
    else:
        terms, base = _take_turns(
            exact, moments, cholesky, rank, sweeps=sweeps, history=history
        )
    stored = base.astype(np.float32).astype(dtype)
    factors: dict[int, Factors] = {}
    # Factors are found against the base as stored: they make up for its rounding too.
    base = stored.astype(np.float64)
    for place, matrix, moment, term in zip(order, exact, moments, terms, strict=True):
        left = term.left
        if len(exact) > 2 or left.shape[1] < rank:  # noqa: PLR2004
            # Two layers' directions are the best for their base. Of more layers, all
            # but the last have seen the base move since their turn.
            left = top_directions(matrix - base, Metric(moment), rank, left)
        factors[place] = _factors(left, left.T @ matrix - left.T @ base, dtype)
    return Fit(stored, tuple(factors[place] for place in range(len(order))))


def shared_error(
    matrices: Sequence[Array], moments: Sequence[Float64], rank: int
) -> float:
    """Return how small f gets where layers share a base: of three or more, in a sweep.

    Args:
        matrices: W_i ``[out, in]``; one alone is its own base.
        moments: C_i ``[in, in]``, definite.
        rank: r.
    """
    exact = [np.asarray(matrix, dtype=np.float64) for matrix in matrices]
    if len(exact) == 1:
        return 0.0
    cholesky = _factorised(_sum(moments))
    if len(exact) == 2:  # noqa: PLR2004
        terms, base = _solve_two(exact, moments, cholesky, rank)
        return _objective(exact, terms, base, moments)
    history: list[float] = []
    _take_turns(exact, moments, cholesky, rank, sweeps=1, history=history)
    return history[0]


def weighted_gains(matrices: Sequence[Array], moments: Sequence[Float64]) -> Float64:
    """Return what each rank takes from f, by spectra alone.

    For two layers that is what `fit_weighted` reaches: rank r leaves what
    ``W_1 - W_2``, measured by P, has beyond its 2r strongest parts. For more layers it
    is the spectra of the residuals around the base that is best without factors. That
    base could follow the factors, so what they leave of f is more than a fit leaves.

    Args:
        matrices: W_i ``[out, in]``, two or more.
        moments: C_i ``[in, in]``, definite (`with_ridge`).

    Returns:
        ``[min(out, in)]``, falling: the entry k is what rank k + 1 takes from the f
        that rank k leaves. Their sum is f of the base alone.
    """
    exact = [np.asarray(matrix, dtype=np.float64) for matrix in matrices]
    cholesky = _factorised(_sum(moments))
    gains = np.zeros(min(exact[0].shape))
    if len(exact) == 2:  # noqa: PLR2004
        _, square, rest = _difference(exact, moments, cholesky, reduced=True)
        values = _falling_spectrum((rest @ moments[0]) @ square.T)
        # Both layers' terms take one direction each.
        first, second = values[::2], values[1::2]
        gains[: len(first)] += first
        gains[: len(second)] += second
        return gains
    base = _best_base(exact, _no_terms(exact), moments, cholesky)
    for matrix, moment in zip(exact, moments, strict=True):
        residual = matrix - base
        if residual.shape[0] > residual.shape[1]:
            residual = np.asarray(np.linalg.qr(residual, mode="r"))
        gains += _falling_spectrum(residual @ moment @ residual.T)
    return gains


def _falling_spectrum(gram: Float64) -> Float64:
    return falling(eigvalsh(gram, check_finite=False))


def _sum(arrays: Sequence[Float64]) -> Float64:
    """Return the sum of two arrays or more, not put side by side for it."""
    first, second, *others = arrays
    total = first + second
    for other in others:
        total += other
    return total


def _factorised(symmetric: Float64) -> tuple[Float64, bool]:
    """Return the Cholesky factor of a definite matrix, in the matrix's own memory.

    LAPACK's order is that of columns: of a symmetric matrix the same numbers.
    """
    factor: tuple[Float64, bool] = cho_factor(
        symmetric.T, lower=True, overwrite_a=True, check_finite=False
    )
    return factor


class _Term(NamedTuple):
    """One layer's ``L = left · right``: ``[out, r]`` and ``[r, in]``."""

    left: Float64
    right: Float64


def _no_terms(exact: Sequence[Float64]) -> list[_Term]:
    out_dim, in_dim = exact[0].shape
    return [_Term(np.zeros((out_dim, 0)), np.zeros((0, in_dim))) for _ in exact]


class _Difference(NamedTuple):
    """How two layers differ: ``D = W_1 - W_2``, and ``D·C_2·S⁻¹``.

    The latter is W_1's distance from the base that is best without terms. Of a tall D
    only the square part may be worked with, ``D = frame · square``; else there is no
    frame. As ``P = C_2·S⁻¹·C_1``, ``D·P·Dᵀ`` is ``rest·C_1·squareᵀ``.
    """

    frame: Float64 | None
    square: Float64
    rest: Float64


def _difference(
    exact: Sequence[Float64],
    moments: Sequence[Float64],
    cholesky: Any,
    *,
    reduced: bool,
) -> _Difference:
    difference = exact[0] - exact[1]
    tall = reduced and difference.shape[0] > difference.shape[1]
    frame, square = np.linalg.qr(difference) if tall else (None, difference)
    if len(square) > len(moments[1]):
        # C_2·S⁻¹ has fewer rows than D.
        share = cho_solve(cholesky, moments[1].T, check_finite=False).T
        rest = square @ share
    else:
        weighted = square @ moments[1]
        rest = cho_solve(cholesky, weighted.T, overwrite_b=True, check_finite=False).T
    return _Difference(frame, square, rest)


def _solve_two(
    exact: Sequence[Float64], moments: Sequence[Float64], cholesky: Any, rank: int
) -> tuple[list[_Term], Float64]:
    """Return both terms and the base.

    The base is W_2's own, moved by ``(A_1 - A_2)·C_1·S⁻¹``, which is
    ``(1 - U·Uᵀ)·(D - D·C_2·S⁻¹)``, where U are both layers' directions.
    """
    shape = exact[0].shape
    count = min(2 * rank, *shape)
    sampled = sample_width(count) <= _PAIR_SHARE * min(shape)
    frame, square, rest = _difference(exact, moments, cholesky, reduced=not sampled)
    if sampled:
        # In float32: see `Metric`.
        wide, own, moment = (
            np.asarray(part, np.float32) for part in (square, rest, moments[0])
        )
        left = _sampled_directions(
            lambda block: own @ (moment @ (wide.T @ block)),
            wide @ random_block(shape[1], sample_width(count)),
            count,
            _PAIR_STEPS,
        )
    else:
        left = _top_eigenvectors((rest @ moments[0]) @ square.T, count)
    right = left.T @ square
    pull = np.subtract(square, rest, out=rest)
    pull -= left @ (left.T @ pull)
    if frame is not None:
        left, pull = frame @ left, frame @ pull
    # Which layer carries which direction is free; this way both have about the same.
    terms = [
        _Term(left[:, ::2], right[::2]),
        _Term(left[:, 1::2], -right[1::2]),
    ]
    pull += exact[1]
    pull -= terms[1].left @ terms[1].right
    return terms, pull


def _take_turns(
    exact: Sequence[Float64],
    moments: Sequence[Float64],
    cholesky: Any,
    rank: int,
    *,
    sweeps: int,
    history: list[float],
) -> tuple[list[_Term], Float64]:
    terms = _no_terms(exact)
    total = _sum(moments)
    # Moments never change, and so neither do these.
    rests = [_factorised(total - moment) for moment in moments]
    metrics = [Metric(moment, cholesky) for moment in moments]
    del total
    # sum_j A_j C_j
    weighted = _sum([w @ c for w, c in zip(exact, moments, strict=True)])
    best: tuple[list[_Term], Float64] | None = None
    for sweep in range(sweeps):
        for layer, (matrix, moment) in enumerate(zip(exact, moments, strict=True)):
            left, right = terms[layer]
            others = weighted - (matrix - left @ right) @ moment
            residual = matrix - cho_solve(rests[layer], others.T, check_finite=False).T
            # From the second turn on it begins where the last one ended.
            start = left if sweep else None
            left = top_directions(residual, metrics[layer], rank, start)
            old = terms[layer]
            terms[layer] = _Term(left, left.T @ residual)
            # Thin products: what the layer's term was, less what it is.
            change = (old.right @ moment, terms[layer].right @ moment)
            weighted += old.left @ change[0] - left @ change[1]
        base = _best_base(exact, terms, moments, cholesky)
        error = _objective(exact, terms, base, moments)
        # Rounding apart it cannot have risen; the best is kept all the same.
        if best is None or error < min(history):
            best = list(terms), base
        history.append(error)
        if len(history) > 1 and history[-2] - error <= _STALL * history[-2]:
            break
    if best is None:
        msg = f"sweeps has to be positive, not {sweeps}"
        raise ValueError(msg)
    return best


def top_directions(
    residual: Float64, metric: Metric, rank: int, start: Float64 | None = None
) -> Float64:
    """Return the top eigenvectors of ``D·P·Dᵀ`` as orthonormal columns ``[out, r]``.

    ``U·Uᵀ·D`` is then the best approximation of D of rank r where errors E are
    measured as ``tr(E·P·Eᵀ)``. The shorter side is diagonalised, or a sample of the
    range where r is small beside it.

    Args:
        residual: D ``[out, in]``.
        metric: Multiplies by P.
        rank: r, at most ``min(out, in)``.
        start: Columns that are expected to be close; the sample then begins with
            them, and the result is no worse than they are.
    """
    out_dim, in_dim = residual.shape
    if sample_width(rank) > _SAMPLED_SHARE * min(residual.shape):
        if out_dim <= in_dim:
            return _top_eigenvectors(residual @ metric(residual.T), rank)
        frame, square = np.linalg.qr(residual)
        return np.asarray(frame @ _top_eigenvectors(square @ metric(square.T), rank))
    narrow, times = residual.astype(np.float32), metric.narrow
    if start is None:
        block = narrow @ times(random_block(in_dim, sample_width(rank)))
    else:
        extra = narrow @ random_block(in_dim, sample_width(rank) - start.shape[1])
        block = np.hstack([start.astype(np.float32), extra])
    return _sampled_directions(
        lambda block: narrow @ times(narrow.T @ block), block, rank
    )


def _sampled_directions(
    apply: Callable[[Array], Array],
    block: Array,
    rank: int,
    steps: int = _POWER_STEPS,
) -> Float64:
    """Return the top eigenvectors of a matrix ``[out, out]`` that multiplies blocks.

    Args:
        apply: Multiplies a block ``[out, k]`` in float32.
        block: Where to begin ``[out, k]``.
        rank: How many.
        steps: How many products before the last.
    """
    for _ in range(steps):
        block = apply(independent(block))
    basis = independent(block)
    exact = basis.astype(np.float64)
    vectors = eigh(
        exact.T @ apply(basis),
        # The basis is not orthonormal.
        exact.T @ exact,
        subset_by_index=(basis.shape[1] - rank, basis.shape[1] - 1),
        check_finite=False,
    )[1]
    left = exact @ vectors[:, ::-1]
    # Orthonormal to the last digit, or U·Uᵀ would be no projection: a step of Newton's
    # iteration for the nearest such columns squares what they are off by.
    return np.asarray(1.5 * left - 0.5 * left @ (left.T @ left))


def _top_eigenvectors(gram: Float64, rank: int) -> Float64:
    size = len(gram)
    # Only one triangle is read, so rounding need not be symmetric.
    vectors = eigh(gram, subset_by_index=(size - rank, size - 1), check_finite=False)[1]
    return np.asarray(vectors[:, ::-1])


def _best_base(
    exact: Sequence[Float64],
    terms: Sequence[_Term],
    moments: Sequence[Float64],
    cholesky: Any,
) -> Float64:
    """Return ``(sum_i A_i C_i) S⁻¹``, as the last A_i and a sum of differences to it.

    That way equal A_i give that very matrix, and rounding is relative to how far they
    are apart.
    """
    *others, last = (
        matrix - term.left @ term.right
        for matrix, term in zip(exact, terms, strict=True)
    )
    pull = np.sum(
        [
            (other - last) @ moment
            for other, moment in zip(others, moments, strict=False)
        ],
        axis=0,
    )
    return np.asarray(last + cho_solve(cholesky, pull.T, check_finite=False).T)


def _objective(
    exact: Sequence[Float64],
    terms: Sequence[_Term],
    base: Float64,
    moments: Sequence[Float64],
) -> float:
    error = 0.0
    for matrix, term, moment in zip(exact, terms, moments, strict=True):
        rest = matrix - base - term.left @ term.right
        error += float(np.vdot(rest @ moment, rest))
    return error


def _factors(left: Float64, right: Float64, dtype: np.dtype[Any]) -> Factors:
    s = np.linalg.norm(right, axis=1)
    return signed_factors(left, s, right / nonzero(s)[:, None], dtype)
