"""Speed of the decomposition, as ratios of medians taken in turn within one run.

- the plain method against a full SVD of every residual, on one band of a real model and
  on matrices of 4B and 27B shape, with the error it adds;
- the weighted method against the plain one, on the same band, statistics given;
- the time of one matrix from 270M to 27B shapes, a cost line fitted to it, and the time
  that line predicts for a whole 27B.

Machines differ and are shared: a ratio within a run says something, a time does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnquant.cli.text import format_duration, format_table
from attnquant.plugins import installed_plugins
from attnquant.theta.checkpoint import RenamedTensors, open_checkpoint
from attnquant.theta.families import FAMILIES
from attnquant.theta.lowrank import (
    apply_factors,
    fit_plain,
    mean_base,
    truncated_svd,
)
from attnquant.theta.names import projection_name
from attnquant.theta.statistics import input_of
from attnquant.theta.weighted import fit_weighted, with_ridge

RANKS = (16, 64)
LAYERS = (6, 7)
"""The band of the real model: two layers in its middle."""

SHAPES = {
    "4B": {"q_proj": (2048, 2560), "k_proj": (1024, 2560)},
    "27B": {"q_proj": (4096, 5376), "k_proj": (2048, 5376)},
}
"""Matrices of larger models whose full SVD is a matter of a minute, not of hours."""

SCALE = {
    "270M": (640, 2048, 1024, 256, 18),
    "1B": (1152, 6912, 1024, 256, 26),
    "4B": (2560, 10240, 2048, 1024, 34),
    "12B": (3840, 15360, 4096, 2048, 48),
    "27B": (5376, 21504, 4096, 2048, 62),
}
"""Gemma 3's sizes: hidden, inner, query and key width, layers."""

Float32 = npt.NDArray[np.float32]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    band = _band(options.checkpoint)
    report: dict[str, Mapping[str, object]] = {
        "real model": _real(band, options.rounds),
        "larger matrices": _larger(),
        "scaling": _scaling(options.out / "bench_decompose.png"),
    }
    path = options.out / "bench_decompose.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _show(report)
    print(f"written to {path} and {path.with_suffix('.png')}")
    return 0


def _medians(what: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, run in turn so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(rounds):
        for name, run in what.items():
            seconds[name].append(_seconds(run))
    return {name: statistics.median(times) for name, times in seconds.items()}


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _band(checkpoint: Path) -> dict[str, list[Float32]]:
    """Read one band of the real model, in float32."""
    source = open_checkpoint(checkpoint)
    prefix_map = installed_plugins().find(source.architecture).prefix_map(source.config)
    tensors = RenamedTensors(source.tensors, prefix_map.rename(source.tensors))
    return {
        family: [
            tensors[projection_name(layer, family)].astype(np.float32)
            for layer in LAYERS
        ]
        for family in FAMILIES
    }


def _moments(width: int, layers: int) -> list[Float32]:
    """Return second moments with strong and weak directions, as real inputs have."""
    rng = np.random.default_rng(width)
    found = []
    for _ in range(layers):
        x = rng.standard_normal((2 * width, width), dtype=np.float32)
        x *= np.geomspace(10, 0.1, width, dtype=np.float32)
        moment: Float32 = x.T @ x / np.float32(len(x))
        found.append(moment)
    return found


def _full_svd(matrices: Sequence[Float32], rank: int) -> list[Float32]:
    base = mean_base(list(matrices), np.dtype(np.float32))
    found: list[Float32] = []
    for matrix in matrices:
        left, s, right = np.linalg.svd(matrix - base, full_matrices=False)
        best = base + (left[:, :rank] * s[:rank]) @ right[:rank]
        found.append(np.asarray(best, dtype=np.float32))
    return found


def _error(matrices: Sequence[Float32], found: Sequence[Float32]) -> float:
    squares = sum(
        float(np.square(w - f, dtype=np.float64).sum())
        for w, f in zip(matrices, found, strict=True)
    )
    return float(np.sqrt(squares))


def _real(band: Mapping[str, Sequence[Float32]], rounds: int) -> dict[str, float]:
    inputs = {
        input_of(family): matrices[0].shape[1] for family, matrices in band.items()
    }
    moments = {name: _moments(width, len(LAYERS)) for name, width in inputs.items()}
    float32 = np.dtype(np.float32)

    def full(rank: int) -> list[list[Float32]]:
        return [_full_svd(matrices, rank) for matrices in band.values()]

    def plain(rank: int) -> list[list[Float32]]:
        fits = [fit_plain(list(ws), rank, float32) for ws in band.values()]
        return [
            [np.asarray(apply_factors(f.base, part)) for part in f.factors]
            for f in fits
        ]

    def weighted(rank: int) -> None:
        for family, matrices in band.items():
            regular = [with_ridge(moment) for moment in moments[input_of(family)]]
            fit = fit_weighted(list(matrices), regular, rank, float32)
            for part in fit.factors:
                apply_factors(fit.base, part)

    figures = {}
    for rank in RANKS:
        medians = _medians(
            {
                "full": lambda rank=rank: full(rank),  # type: ignore[misc]
                "plain": lambda rank=rank: plain(rank),  # type: ignore[misc]
                "weighted": lambda rank=rank: weighted(rank),  # type: ignore[misc]
            },
            rounds,
        )
        errors = [
            [_error(ws, found) for ws, found in zip(band.values(), fits, strict=True)]
            for fits in (plain(rank), full(rank))
        ]
        worst = max(ours / best for ours, best in zip(*errors, strict=True))
        figures[f"plain r={rank}: times faster than a full SVD"] = (
            medians["full"] / medians["plain"]
        )
        figures[f"plain r={rank}: error, times the smallest (worst family)"] = worst
        figures[f"weighted r={rank}: times the plain method's time"] = (
            medians["weighted"] / medians["plain"]
        )
    return figures


def _larger() -> dict[str, float]:
    figures = {}
    float32 = np.dtype(np.float32)
    for model, shapes in SHAPES.items():
        for family, shape in shapes.items():
            matrix = _decaying(shape)
            full = _seconds(lambda m=matrix: np.linalg.svd(m, full_matrices=False))  # type: ignore[misc]
            for rank in RANKS:
                plain = _medians(
                    {"": lambda m=matrix, r=rank: truncated_svd(m, r, float32)},  # type: ignore[misc]
                    3,
                )[""]
                name = f"{model} {family} {shape[0]}x{shape[1]} r={rank}"
                figures[f"{name}: times faster than a full SVD"] = full / plain
    return figures


def _decaying(shape: tuple[int, int]) -> Float32:
    """Return a matrix whose columns fall slowly in size, as residuals' spectra do."""
    matrix = np.random.default_rng(shape[1]).standard_normal(shape, dtype=np.float32)
    return matrix * np.geomspace(1, 0.2, shape[1], dtype=np.float32)


def _layer_shapes(model: str) -> list[tuple[int, int]]:
    hidden, inner, queries, keys, _ = SCALE[model]
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


def _scaling(picture: Path, rank: int = 64) -> dict[str, object]:
    """Time one matrix of each shape, fit seconds to work, predict whole models."""
    float32 = np.dtype(np.float32)
    points = []
    for model in SCALE:
        for shape in sorted(set(_layer_shapes(model))):
            matrix = _decaying(shape)
            times = [
                _seconds(lambda m=matrix: truncated_svd(m, rank, float32))  # type: ignore[misc]
                for _ in range(3)
            ]
            points.append((model, shape, min(times)))
    work = np.array([float(out_dim * in_dim) for _, (out_dim, in_dim), _ in points])
    seconds = np.array([point[2] for point in points])
    # In relative terms, or the largest matrices alone would decide.
    terms = np.stack([work, np.ones_like(work)], axis=1)
    slope, start = np.linalg.lstsq(
        terms / seconds[:, None], np.ones_like(seconds), rcond=None
    )[0]
    predicted = {
        model: sizes[-1]
        * sum(
            slope * out_dim * in_dim + start for out_dim, in_dim in _layer_shapes(model)
        )
        for model, sizes in SCALE.items()
    }
    _draw(picture, points, slope, start, predicted)
    return {
        "rank": rank,
        "seconds per matrix entry": float(slope),
        "seconds per matrix": float(start),
        "largest relative miss of the line": float(
            np.abs((terms @ [slope, start]) / seconds - 1).max()
        ),
        "predicted seconds for the plain method's factors": {
            model: float(value) for model, value in predicted.items()
        },
    }


def _draw(
    picture: Path,
    points: Sequence[tuple[str, tuple[int, int], float]],
    slope: float,
    start: float,
    predicted: Mapping[str, float],
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for model in predicted:
        own = [(o * i, t) for name, (o, i), t in points if name == model]
        label = f"{model}: {format_duration(predicted[model])} for all layers"
        axes.loglog(*zip(*own, strict=True), "o", label=label)
    sizes = [o * i for _, (o, i), _ in points]
    entries = np.geomspace(min(sizes), max(sizes))
    axes.loglog(
        entries, slope * entries + start, "k-", linewidth=1, label="fitted line"
    )
    axes.set_xlabel("entries of the matrix")
    axes.set_ylabel("seconds")
    axes.set_title("One truncated SVD of rank 64, at Gemma 3's shapes")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _show(report: Mapping[str, Mapping[str, object]]) -> None:
    rows = [
        (name, f"{figure:.2f}")
        for part in ("real model", "larger matrices")
        for name, figure in report[part].items()
    ]
    print(format_table(("what", "ratio"), rows))
    predicted = report["scaling"]["predicted seconds for the plain method's factors"]
    assert isinstance(predicted, dict)
    for model, seconds in predicted.items():
        print(f"a whole {model}, plain, r=64: about {format_duration(seconds)}")


if __name__ == "__main__":
    sys.exit(main())
