"""What a bundle keeps of its original, projection by projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnquant.errors import CheckpointError
from attnquant.theta.bundle import Bundle
from attnquant.theta.decompose import effective_weight
from attnquant.theta.dtypes import Array, widen
from attnquant.theta.names import BaseKey, ProjectionKey, base_name, projection_name
from attnquant.theta.statistics import InputKey, Statistics, input_of

Progress = Callable[[str, int, int], None]
"""Called with what has just been looked at, the steps done, and the steps in all."""

SPECTRA_LAYERS = 3
"""Of how many layers a family's singular values are taken: each costs a cubic step."""


@dataclass(frozen=True)
class ProjectionAnatomy:
    """One projection that has a shared base.

    Attributes:
        base: The base it shares.
        rank: Of its low-rank term.
        error: ``||W - W_eff|| / ||W||`` (Frobenius).
        base_error: ``||W - W0|| / ||W||``, what the base alone leaves.
        output_error: The error of outputs on the calibration text,
            ``sqrt(tr(E·C·Eᵀ) / tr(W·C·Wᵀ))`` with ``E = W - W_eff``; None without
            statistics.
    """

    base: BaseKey
    rank: int
    error: float
    base_error: float
    output_error: float | None


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one projection, and of what its base leaves of it.

    Attributes:
        rank: Of its low-rank term.
        weight: Singular values of W, falling.
        residual: Those of ``W - W0``.
    """

    rank: int
    weight: npt.NDArray[np.float64]
    residual: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Anatomy:
    """What was found out about one bundle.

    Attributes:
        bundle: The bundle.
        projections: Every projection that has a base.
        spectra: Some layers of every family that has a low-rank term.
    """

    bundle: Bundle
    projections: Mapping[ProjectionKey, ProjectionAnatomy]
    spectra: Mapping[str, Mapping[int, Spectrum]]

    @property
    def has_output_errors(self) -> bool:
        """Whether errors of outputs are known."""
        return all(p.output_error is not None for p in self.projections.values())


def examine(
    bundle: Bundle,
    original: Mapping[str, Array],
    statistics: Statistics | None = None,
    progress: Progress | None = None,
) -> Anatomy:
    """Compare a bundle with its original; a few matrices are in memory at a time.

    Args:
        bundle: An open bundle.
        original: Canonical names to ``[out, in]`` arrays; it may read lazily.
        statistics: The original's, if errors of outputs are wanted.
        progress: Called as work goes on.

    Raises:
        CheckpointError: If the original lacks a projection or has one of another
            shape, or the statistics are of something else.
    """
    layout = bundle.info.layout
    if statistics is not None:
        statistics.check_shapes(
            {
                ProjectionKey(layer, base.family): layout.shapes[base]
                for base, layers in layout.bases.items()
                for layer in layers
            }
        )
    chosen = _spectra_layers(bundle)
    total = sum(map(len, layout.bases.values()))
    projections: dict[ProjectionKey, ProjectionAnatomy] = {}
    spectra: dict[str, dict[int, Spectrum]] = {}
    for base, layers in layout.bases.items():
        shared = widen(bundle.checkpoint.tensors[base_name(*base)])
        for layer in layers:
            key = ProjectionKey(layer, base.family)
            exact = _original(original, key, layout.shapes[base])
            projections[key] = _examine(
                exact,
                shared,
                effective_weight(bundle.checkpoint.tensors, base, layer),
                _moment(statistics, key),
                base=base,
                rank=layout.rank_of(base),
            )
            if layer in chosen[base.family]:
                spectra.setdefault(base.family, {})[layer] = Spectrum(
                    layout.rank_of(base),
                    singular_values(exact),
                    singular_values(exact - shared),
                )
            if progress:
                progress(projection_name(*key), len(projections), total)
    return Anatomy(bundle, projections, spectra)


def singular_values(matrix: Array) -> npt.NDArray[np.float64]:
    """Return singular values, falling, by the Gram matrix of the shorter side.

    Squaring loses what is below 1e-8 of the largest, which no plot shows.
    """
    wide = matrix.astype(np.float64)
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    values = np.linalg.eigvalsh(gram)[::-1]
    return np.asarray(np.sqrt(np.maximum(values, 0.0)))


def _examine(
    exact: Array,
    shared: Array,
    effective: Array,
    moment: Array | None,
    *,
    base: BaseKey,
    rank: int,
) -> ProjectionAnatomy:
    difference, norm = exact - effective, _square(exact)
    output_error = None
    if moment is not None:
        output_error = _relative(
            _weighted_square(difference, moment), _weighted_square(exact, moment)
        )
    return ProjectionAnatomy(
        base=base,
        rank=rank,
        error=_relative(_square(difference), norm),
        base_error=_relative(_square(exact - shared), norm),
        output_error=output_error,
    )


def _moment(statistics: Statistics | None, key: ProjectionKey) -> Array | None:
    if statistics is None:
        return None
    return statistics.moment(InputKey(key.layer, input_of(key.family)))


def _original(
    original: Mapping[str, Array], key: ProjectionKey, shape: Sequence[int]
) -> Array:
    name = projection_name(*key)
    found = tuple(original[name].shape) if name in original else None
    if found != tuple(shape):
        raise CheckpointError(
            name,
            expected=f"a tensor of shape {list(shape)} in the original",
            found="none" if found is None else str(list(found)),
            hint="Is this what the bundle was made from?",
        )
    return widen(original[name])


def _spectra_layers(bundle: Bundle) -> dict[str, set[int]]:
    """Choose layers with a low-rank term, spread evenly over the model."""
    layout = bundle.info.layout
    chosen = {}
    for family in layout.tied_projections:
        layers = sorted(
            layer
            for base, members in layout.bases.items()
            if base.family == family and layout.rank_of(base)
            for layer in members
        )
        count = min(SPECTRA_LAYERS, len(layers))
        places = np.linspace(0, len(layers) - 1, count).round().astype(int)
        chosen[family] = {layers[place] for place in places}
    return chosen


def _square(matrix: Array) -> float:
    return float(np.square(matrix, dtype=np.float64).sum())


def _weighted_square(matrix: Array, moment: Array) -> float:
    """Return ``tr(M·C·Mᵀ)``."""
    return float(np.multiply(matrix @ moment, matrix, dtype=np.float64).sum())


def _relative(error: float, norm: float) -> float:
    # Rounding may push a weighted sum of squares below nothing.
    if error <= 0:
        return 0.0
    return math.sqrt(error / norm) if norm > 0 else math.inf
