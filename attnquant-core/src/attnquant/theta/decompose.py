"""Decomposition: a standard state dict to theta tensors, one base at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnquant.errors import CheckpointError
from attnquant.theta.dtypes import (
    FLOAT32,
    STORAGE_DTYPES,
    Array,
    is_floating,
    storage_dtype,
    widen,
)
from attnquant.theta.grouping import Grouping, uniform
from attnquant.theta.layout import ThetaLayout, check_positive_rank, make_layout
from attnquant.theta.lowrank import (
    Factors,
    Fit,
    Float32,
    apply_factors,
    fit_plain,
    mean_base,
)
from attnquant.theta.names import (
    FACTORS,
    BaseKey,
    ProjectionKey,
    base_name,
    factor_name,
    is_theta_name,
    parse_base,
    parse_factor,
    parse_projection,
    projection_name,
)
from attnquant.theta.statistics import InputKey, Statistics, input_of
from attnquant.theta.weighted import (
    fit_weighted,
    output_energy,
    weighted_error,
    with_ridge,
)

MEAN_SVD = "mean-svd"
"""The plain method: the mean of the weights, and a truncated SVD of what is left."""

WEIGHTED = "weighted"
"""The method that needs statistics: `attnquant.theta.weighted`."""

METHODS = (WEIGHTED, MEAN_SVD)
"""The identifiers that a bundle records."""

Progress = Callable[[BaseKey], None]
"""Called after each base has been decomposed."""


@dataclass(frozen=True)
class DecomposedBase:
    """A base, the factors around it, and how well they stand for the originals.

    Attributes:
        base: Which one.
        tensors: Theta tensors by name, in the storage dtype.
        squared_error: Sum over its layers of ``||W - W_eff||²`` (Frobenius), as
            stored: rounding to the storage dtype is part of it.
        squared_norm: Sum over its layers of ``||W||²``.
        output_error: Sum over its layers of ``tr((W - W_eff)·C·(W - W_eff)ᵀ)``, the
            mean square of what changes in their outputs; None without statistics.
        output_norm: Sum over its layers of ``tr(W·C·Wᵀ)``; None without statistics.
    """

    base: BaseKey
    tensors: dict[str, Array]
    squared_error: float
    squared_norm: float
    output_error: float | None = None
    output_norm: float | None = None


@dataclass
class FamilyErrors:
    """Accumulates the relative error of each family."""

    _error: dict[str, float] = field(default_factory=dict)
    _norm: dict[str, float] = field(default_factory=dict)

    def add(self, family: str, error: float, norm: float) -> None:
        """Count one base in: its squared error, and what it is relative to."""
        self._error[family] = self._error.get(family, 0.0) + error
        self._norm[family] = self._norm.get(family, 0.0) + norm

    def relative(self) -> dict[str, float]:
        """Return ``sqrt(Σ||W - W_eff||² / Σ||W||²)`` per family."""
        return {
            family: math.sqrt(error / self._norm[family]) if error else 0.0
            for family, error in self._error.items()
        }


def projection_shapes(
    tensors: Mapping[str, Any],
) -> dict[ProjectionKey, tuple[int, ...]]:
    """Return the shape of each projection among canonically named tensors."""
    return {
        key: tuple(tensors[name].shape)
        for name in tensors
        if (key := parse_projection(name)) is not None
    }


def iter_decomposed(
    state_dict: Mapping[str, Array],
    layout: ThetaLayout,
    dtype: str | None = None,
    statistics: Statistics | None = None,
) -> Iterator[DecomposedBase]:
    """Decompose base after base; only one base's matrices are read at a time.

    Args:
        state_dict: Canonical names to ``[out, in]`` arrays; it may read lazily.
        layout: Which bases there are.
        dtype: Storage dtype of W0, U, s and V; by default what the projection has
            (float32 for what cannot be stored as it is).
        statistics: What the weighted method is to fit to; None for the plain one.

    Raises:
        CheckpointError: If a projection is not floating-point, or holds a NaN or an
            infinity; or if the statistics lack a moment.
    """
    for base in layout.bases:
        yield decompose_base(state_dict, layout, base, dtype, statistics)


def decompose_base(
    state_dict: Mapping[str, Array],
    layout: ThetaLayout,
    base: BaseKey,
    dtype: str | None = None,
    statistics: Statistics | None = None,
) -> DecomposedBase:
    """Decompose the layers of one base; arguments as for `iter_decomposed`.

    Raises:
        CheckpointError: As `iter_decomposed` does.
    """
    layers = layout.bases[base]
    matrices = read_matrices(state_dict, layout, base)
    target = storage_dtype(dtype) if dtype else _default_dtype(matrices[0])
    rank = layout.rank_of(base)
    if len(layers) == 1:
        moments: list[Float32] = []
        fit = Fit(mean_base(matrices, target), ())
    elif statistics is None:
        moments = []
        fit = fit_plain(matrices, rank, target)
    else:
        source = input_of(base.family)
        moments = [statistics.moment(InputKey(layer, source)) for layer in layers]
        regular = [with_ridge(moment) for moment in moments]
        fit = fit_weighted(matrices, regular, rank, target)
        del regular
    return _measured(base, layers, matrices, fit, moments)


def decompose_standard_state_dict_to_attnquant(
    state_dict: Mapping[str, Array],
    rank: int | None,
    shared_blocks: int,
    *,
    tie_families: str = "all",
    grouping: Grouping = uniform,
    num_layers: int | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Array]:
    """Replace every tied projection by its shared base and low-rank term.

    Args:
        state_dict: Canonical names (``layers.{i}.self_attn.q_proj.weight``) to
            arrays; tensors that are no tied projection are handed through untouched.
        rank: r, a positive integer; without effect at passthrough (``G == L``).
        shared_blocks: G, from 1 to L.
        tie_families: ``"all"`` or ``"attn"``.
        grouping: The W0 grouping key of the architecture.
        num_layers: L; by default the highest layer among the projections, plus one.
        dtype: Storage dtype of theta tensors, ``"float32"`` or ``"bfloat16"``; by
            default each projection's own.
        progress: Called after each base.

    Returns:
        Theta tensors and all other tensors, by name.

    Raises:
        SettingError: If r, G or the tie mode is out of bounds.
        CheckpointError: If a projection is missing, of the wrong shape, or not
            finite; or if the state dict is decomposed already.
    """
    if is_attnquant_theta_dict(state_dict):
        raise CheckpointError(
            "state_dict",
            expected="a standard state dict",
            found="theta tensors (it is decomposed already)",
        )
    if rank is not None:
        check_positive_rank(rank)
    shapes = projection_shapes(state_dict)
    if not shapes:
        raise CheckpointError(
            "state_dict",
            expected="canonical names such as " + projection_name(0, "q_proj"),
            found="none among " + ", ".join(sorted(state_dict)[:3] or ["no tensors"]),
            hint="Apply the architecture's prefix map first.",
        )
    layout = make_layout(
        shapes,
        num_layers=num_layers or 1 + max(key.layer for key in shapes),
        shared_blocks=shared_blocks,
        lora_rank=rank,
        tie_families=tie_families,
        grouping=grouping,
    )
    theta = {name: state_dict[name] for name in kept_names(state_dict, layout)}
    for part in iter_decomposed(state_dict, layout, dtype):
        theta.update(part.tensors)
        if progress:
            progress(part.base)
    return theta


def kept_names(names: Iterable[str], layout: ThetaLayout) -> list[str]:
    """Return the canonical names of the tensors that a decomposition leaves alone."""
    return [
        name
        for name in names
        if (key := parse_projection(name)) is None or layout.base_of(*key) is None
    ]


def is_attnquant_theta_dict(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict holds theta tensors (canonical names)."""
    return any(is_theta_name(name) for name in state_dict)


def reconstruct(
    theta: Mapping[str, Array], layout: ThetaLayout | None = None
) -> dict[str, Array]:
    """Return the effective weight of every decomposed projection.

    ``W_eff[i] = W0[band(i)][group(i)][family] + U[i] · diag(s[i]) · V[i]``

    Args:
        theta: Theta tensors by name; others are ignored.
        layout: Which layer uses which base. A uniform model's can be derived from
            the tensor names alone; a grouped one needs it.

    Returns:
        Canonical names to ``[out, in]`` float32 arrays, summed in float64.

    Raises:
        CheckpointError: If a tensor is missing, or a grouped model comes without
            its layout.
    """
    users = dict(layout.bases) if layout else _uniform_bases(theta)
    weights = {}
    for base, layers in users.items():
        for layer in layers:
            # Without a layout, layers that share a base are taken to differ from it.
            name = factor_name(layer, base.family, FACTORS[0])
            has_factors = layout.rank_of(base) > 0 if layout else len(layers) > 1
            if has_factors and name not in theta:
                raise CheckpointError(
                    name,
                    expected=f"a factor, since {len(layers)} layers share"
                    f" {base_name(*base)}",
                    found="no such tensor",
                )
            weights[projection_name(layer, base.family)] = effective_weight(
                theta, base, layer
            )
    return weights


def effective_weight(theta: Mapping[str, Array], base: BaseKey, layer: int) -> Array:
    """Return one projection's ``W_eff`` ``[out, in]`` in float32.

    Raises:
        CheckpointError: If the base, or one factor of three, is missing.
    """
    if (name := base_name(*base)) not in theta:
        raise CheckpointError(name, expected="a shared base", found="no such tensor")
    names = [factor_name(layer, base.family, factor) for factor in FACTORS]
    present = [name for name in names if name in theta]
    if present and len(present) < len(names):
        missing = next(name for name in names if name not in theta)
        raise CheckpointError(
            missing, expected="a factor beside " + present[0], found="no such tensor"
        )
    factors = Factors(*(theta[name] for name in names)) if present else None
    return apply_factors(theta[base_name(*base)], factors)


def relative_frobenius_error(
    original: Mapping[str, Array] | Array, approximation: Mapping[str, Array] | Array
) -> float:
    """Return ``||original - approximation||_F / ||original||_F``, summed in float64.

    Args:
        original: An array, or arrays by name.
        approximation: The same; for mappings, the norm runs over every name in it.

    Raises:
        KeyError: If the original has no such name.
        ValueError: If shapes differ.
    """
    if isinstance(original, Mapping) != isinstance(approximation, Mapping):
        msg = "give two arrays or two mappings of arrays"
        raise TypeError(msg)
    if not isinstance(original, Mapping) or not isinstance(approximation, Mapping):
        return relative_frobenius_error(
            {"": np.asarray(original)}, {"": np.asarray(approximation)}
        )
    error = norm = 0.0
    for name, array in approximation.items():
        exact = np.asarray(original[name], dtype=np.float64)
        if exact.shape != array.shape:
            msg = f"{name}: shapes {exact.shape} and {array.shape} differ"
            raise ValueError(msg)
        error += float(np.square(exact - np.asarray(array, dtype=np.float64)).sum())
        norm += float(np.square(exact).sum())
    if not error:
        return 0.0
    return math.sqrt(error / norm) if norm else math.inf


def _measured(
    base: BaseKey,
    layers: tuple[int, ...],
    matrices: Sequence[Array],
    fit: Fit,
    moments: Sequence[Float32],
) -> DecomposedBase:
    """Name a fit's tensors, and compare it, as stored, with the original."""
    check_finite(f"{base_name(*base)} in {fit.base.dtype}", fit.base)
    tensors = {base_name(*base): fit.base}
    squared_error = squared_norm = output_error = output_norm = 0.0
    for index, (layer, matrix) in enumerate(zip(layers, matrices, strict=True)):
        exact = widen(matrix)
        factors = fit.factors[index] if fit.factors else None
        for factor, value in zip(FACTORS, factors or (), strict=False):
            name = factor_name(layer, base.family, factor)
            check_finite(f"{name} in {value.dtype}", value)
            tensors[name] = value
        difference = exact - apply_factors(fit.base, factors)
        squared_error += float(np.square(difference, dtype=np.float64).sum())
        squared_norm += float(np.square(exact, dtype=np.float64).sum())
        if moments:
            output_error += weighted_error(difference, moments[index])
            output_norm += output_energy(exact, moments[index])
    return DecomposedBase(
        base,
        tensors,
        squared_error,
        squared_norm,
        output_error if moments else None,
        output_norm if moments else None,
    )


def read_matrices(
    state_dict: Mapping[str, Array], layout: ThetaLayout, base: BaseKey
) -> list[Array]:
    """Read the matrices ``[out, in]`` of the layers that share a base.

    Raises:
        CheckpointError: If one is not floating-point, or not finite.
    """
    matrices = []
    for layer in layout.bases[base]:
        name = projection_name(layer, base.family)
        matrix = state_dict[name]
        if not is_floating(matrix.dtype):
            raise CheckpointError(
                name, expected="a floating-point dtype", found=str(matrix.dtype)
            )
        check_finite(name, matrix)
        matrices.append(matrix)
    return matrices


def check_finite(name: str, array: Array, row: int = 0) -> None:
    """Refuse an array that holds a NaN or an infinity.

    Args:
        name: The tensor's.
        array: The tensor, or rows of it.
        row: The first of them.

    Raises:
        CheckpointError: Naming the tensor and the first bad entry.
    """
    if not is_floating(array.dtype):
        return
    finite = np.isfinite(array)
    if not finite.all():
        where = np.unravel_index(int(np.argmin(finite)), array.shape)
        place = [int(i) for i in where]
        if place:
            place[0] += row
        raise CheckpointError(
            name,
            expected="finite values only",
            found=f"{array[where]} at {place}",
        )


def _default_dtype(matrix: Array) -> np.dtype[Any]:
    if matrix.dtype in STORAGE_DTYPES.values():
        return matrix.dtype
    return FLOAT32


def _uniform_bases(theta: Mapping[str, Array]) -> dict[BaseKey, tuple[int, ...]]:
    """Derive which layer uses which base from the names of a uniform model.

    With G bands over L layers, ``G <= L < 2G`` leaves ``2(L - G)`` layers in bands of
    two and thus with factors; from ``L = 2G`` on every layer has them.

    Raises:
        CheckpointError: If the model has W0 groups, or if families disagree.
    """
    bases = [base for name in theta if (base := parse_base(name))]
    if grouped := next((base for base in bases if base.group), None):
        raise CheckpointError(
            base_name(*grouped),
            expected="a layout, since this model has W0 groups",
            found="none",
            hint="Pass layout=, as a bundle's `layout` gives it.",
        )
    factors = [factor for name in theta if (factor := parse_factor(name))]
    sizes: dict[str, tuple[int, int]] = {}
    for family in sorted({base.family for base in bases}):
        blocks = 1 + max(base.band for base in bases if base.family == family)
        with_factors = len({key.layer for key in factors if key.family == family})
        alone = max(0, blocks - with_factors // 2)
        sizes[family] = blocks, with_factors + alone
    if len(set(sizes.values())) > 1:
        raise CheckpointError(
            "theta tensors",
            expected="the same number of bands and layers in every family",
            found=", ".join(
                f"{blocks} of {num_layers} in {family}"
                for family, (blocks, num_layers) in sizes.items()
            ),
            hint="A tensor is missing; or pass layout=, where families differ.",
        )
    users: dict[BaseKey, list[int]] = {base: [] for base in bases}
    for family, (blocks, num_layers) in sizes.items():
        for layer in range(num_layers):
            base = BaseKey(layer * blocks // num_layers, "", family)
            users.setdefault(base, []).append(layer)
    return {base: tuple(layers) for base, layers in users.items()}
