"""Speed of the decomposition, as ratios within one run.

- the plain method against a full SVD of every residual, on one band of a real model and
  on a layer of 4B shape and the attention of one of 27B shape, with the error it adds;
- the weighted method against the plain one, on the same band, statistics given;
- the plain method's time for a matrix of each shape from 270M to 27B, a cost line
  fitted to them, and what it predicts for whole models; the smallest is timed as well.

Machines differ and are shared: a ratio within a run says something, a time does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from attnquant.cli.text import format_duration, format_table
from attnquant.plugins import installed_plugins
from attnquant.theta.checkpoint import RenamedTensors, open_checkpoint
from attnquant.theta.dtypes import FLOAT32, Array
from attnquant.theta.families import ATTN_FAMILIES, FAMILIES
from attnquant.theta.lowrank import apply_factors, fit_plain, mean_base, truncated_svd
from attnquant.theta.names import projection_name
from attnquant.theta.statistics import input_of
from attnquant.theta.weighted import fit_weighted, with_ridge
from benching import COLOURS, interleaved, medians, seconds_of, write_report

RANKS = (16, 64)
LAYERS = (6, 7)
"""The band of the real model: two layers in its middle."""

LARGER = {"4B": FAMILIES, "27B": ATTN_FAMILIES}
"""What of a layer is compared with full SVDs. A 27B's MLP would take minutes more."""

SCALE = {
    "270M": (640, 2048, 1024, 256, 18),
    "1B": (1152, 6912, 1024, 256, 26),
    "4B": (2560, 10240, 2048, 1024, 34),
    "12B": (3840, 15360, 4096, 2048, 48),
    "27B": (5376, 21504, 4096, 2048, 62),
}
"""Gemma 3's sizes: hidden, inner, query and key width, layers."""

SCALING_RANK = 64

Float32 = npt.NDArray[np.float32]


class Point(NamedTuple):
    """What the plain method took for one matrix of a model, in seconds."""

    model: str
    shape: tuple[int, int]
    seconds: float

    @property
    def entries(self) -> int:
        """How many entries the matrix has."""
        return self.shape[0] * self.shape[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = _open(options.checkpoint)
    real = _real(_band(model, LAYERS), options.rounds)
    larger = {what: figure for name in LARGER for what, figure in _layer(name).items()}
    points = _points()
    line = _fitted(points)
    predicted = {name: _predicted(name, line) for name in SCALE}
    measured = _whole(model)
    path = write_report(
        options.out,
        "bench_decompose",
        {
            "real model": real,
            "larger layers": larger,
            "scaling": {
                "rank": SCALING_RANK,
                "seconds": [point._asdict() for point in points],
                "seconds per matrix entry": line[0],
                "seconds per matrix": line[1],
                "largest relative miss of the line": _miss(points, line),
                "predicted seconds of fitting a model": predicted,
                "measured seconds of fitting the 270M": measured,
            },
        },
    )
    picture = path.with_suffix(".png")
    _draw(picture, points, line, predicted)
    rows = [(name, f"{figure:.4g}") for name, figure in (real | larger).items()]
    print(format_table(("what", "ratio"), rows))
    print(f"the fitted line misses by at most {_miss(points, line):.0%}")
    for name, seconds in predicted.items():
        print(f"a whole {name}, plain, r=64: about {format_duration(seconds)}")
    print(f"the 270M, measured: {measured:.1f} s, predicted {predicted['270M']:.1f} s")
    print(f"written to {path} and {picture}")
    return 0


def _open(checkpoint: Path) -> Mapping[str, Array]:
    """Open the real model under canonical names."""
    source = open_checkpoint(checkpoint)
    prefix_map = installed_plugins().find(source.architecture).prefix_map(source.config)
    return RenamedTensors(source.tensors, prefix_map.rename(source.tensors))


def _band(
    model: Mapping[str, Array], layers: Sequence[int]
) -> dict[str, list[Float32]]:
    """Read one band, in float32."""
    return {
        family: [
            model[projection_name(layer, family)].astype(np.float32) for layer in layers
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
    """Compare the methods on one band of the real model."""
    inputs = {
        input_of(family): matrices[0].shape[1] for family, matrices in band.items()
    }
    moments = {name: _moments(width, len(LAYERS)) for name, width in inputs.items()}

    def full(rank: int) -> list[list[Float32]]:
        return [_full_svd(matrices, rank) for matrices in band.values()]

    def plain(rank: int) -> list[list[Float32]]:
        fits = [fit_plain(list(ws), rank, FLOAT32) for ws in band.values()]
        return [[apply_factors(f.base, part) for part in f.factors] for f in fits]

    def weighted(rank: int) -> None:
        for family, matrices in band.items():
            regular = [with_ridge(moment) for moment in moments[input_of(family)]]
            fit = fit_weighted(list(matrices), regular, rank, FLOAT32)
            for part in fit.factors:
                apply_factors(fit.base, part)

    figures: dict[str, float] = {}
    for rank in RANKS:
        methods = {"full": full, "plain": plain, "weighted": weighted}
        cases = {name: partial(run, rank) for name, run in methods.items()}
        took = medians(interleaved(cases, rounds))
        errors = [
            [_error(ws, found) for ws, found in zip(band.values(), fits, strict=True)]
            for fits in (plain(rank), full(rank))
        ]
        worst = max(ours / best for ours, best in zip(*errors, strict=True))
        label = f"270M band, r={rank}"
        figures |= {
            f"{label}: plain, times faster than a full SVD": (
                took["full"] / took["plain"]
            ),
            f"{label}: plain, error by the smallest (worst family)": worst,
            f"{label}: weighted, times the plain method's time": (
                took["weighted"] / took["plain"]
            ),
            f"{label}: weighted, times faster than a full SVD": (
                took["full"] / took["weighted"]
            ),
        }
    return figures


def _layer(model: str) -> dict[str, float]:
    """Compare the plain method with full SVDs on one layer.

    A full SVD is timed once for all matrices of a shape or its transpose: it takes as
    long for either.
    """
    # The families of attention come first.
    shapes = _layer_shapes(model)[: len(LARGER[model])]
    full = 0.0
    plain = dict.fromkeys(RANKS, 0.0)
    worst = dict.fromkeys(RANKS, 0.0)
    for tall in sorted({(max(shape), min(shape)) for shape in shapes}):
        matrix = _decaying(tall)
        started = time.perf_counter()
        s = np.linalg.svd(matrix, full_matrices=False)[1]
        took = time.perf_counter() - started
        for shape, turned in ((tall, matrix), (tall[::-1], matrix.T.copy())):
            if not (count := shapes.count(shape)):
                continue
            full += count * took
            for rank in RANKS:
                svd = partial(truncated_svd, turned, rank, FLOAT32)
                plain[rank] += count * min(seconds_of(svd) for _ in range(2))
                left, values, right = svd()
                error = np.linalg.norm(turned - (left * values) @ right)
                smallest = np.linalg.norm(s[rank:].astype(np.float64))
                worst[rank] = max(worst[rank], float(error / smallest))
    figures = {}
    for rank in RANKS:
        part = "layer" if LARGER[model] == FAMILIES else "attention"
        label = f"{model} {part}, r={rank}: plain"
        figures[f"{label}, times faster than a full SVD"] = full / plain[rank]
        figures[f"{label}, error by the smallest (worst family)"] = worst[rank]
    return figures


def _decaying(shape: tuple[int, int]) -> Float32:
    """Return a matrix whose columns fall slowly in size, as residuals' spectra do."""
    matrix = np.random.default_rng(shape[1]).standard_normal(shape, dtype=np.float32)
    return matrix * np.geomspace(1, 0.2, shape[1], dtype=np.float32)


def _layer_shapes(model: str) -> list[tuple[int, int]]:
    hidden, inner, queries, keys, _ = SCALE[model]
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


def _points() -> list[Point]:
    """Time the plain method on two matrices of each shape that a model has."""
    points = []
    for model in SCALE:
        for shape in sorted(set(_layer_shapes(model))):
            pair = [_decaying(shape), _decaying(shape)[::-1]]
            fit = partial(fit_plain, pair, SCALING_RANK, FLOAT32)
            # Half of it, since a fit is of two layers.
            best = min(seconds_of(fit) for _ in range(2))
            points.append(Point(model, shape, best / 2))
    return points


def _fitted(points: Sequence[Point]) -> tuple[float, float]:
    """Return seconds per entry and seconds per matrix, by least squares."""
    terms = np.array([[point.entries, 1.0] for point in points])
    seconds = np.array([point.seconds for point in points])
    # In relative terms, or the largest matrices alone would decide.
    slope, start = np.linalg.lstsq(
        terms / seconds[:, None], np.ones_like(seconds), rcond=None
    )[0]
    return float(slope), float(start)


def _miss(points: Sequence[Point], line: tuple[float, float]) -> float:
    slope, start = line
    return max(abs((slope * p.entries + start) / p.seconds - 1) for p in points)


def _predicted(model: str, line: tuple[float, float]) -> float:
    slope, start = line
    layers = SCALE[model][-1]
    return layers * sum(slope * m * n + start for m, n in _layer_shapes(model))


def _whole(model: Mapping[str, Array]) -> float:
    """Time the plain method on the whole real model, reading left out."""
    total = 0.0
    for first in range(0, SCALE["270M"][-1], 2):
        for matrices in _band(model, (first, first + 1)).values():
            total += seconds_of(partial(fit_plain, matrices, SCALING_RANK, FLOAT32))
    return total


def _draw(
    picture: Path,
    points: Sequence[Point],
    line: tuple[float, float],
    predicted: Mapping[str, float],
) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for colour, (model, seconds) in zip(COLOURS, predicted.items(), strict=False):
        own = [point for point in points if point.model == model]
        axes.loglog(
            [point.entries / 1e6 for point in own],
            [point.seconds for point in own],
            "o",
            color=colour,
            label=f"{model} (all layers: {format_duration(seconds)})",
        )
    sizes = [point.entries for point in points]
    entries = np.geomspace(min(sizes), max(sizes))
    slope, start = line
    axes.loglog(
        entries / 1e6,
        slope * entries + start,
        color="#333333",
        linewidth=1,
        label="fitted line",
    )
    axes.set_xlabel("entries of the matrix, millions")
    axes.set_ylabel("time a matrix, seconds")
    axes.set_title("Plain method at rank 64, matrices of Gemma 3's shapes", loc="left")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=144)


if __name__ == "__main__":
    sys.exit(main())
