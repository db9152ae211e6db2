"""The report's pictures, as PNG; matplotlib draws them, and is optional."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from attnquant.report.anatomy import Anatomy, ProjectionAnatomy
from attnquant.report.evaluations import EvaluationFigures
from attnquant.theta.families import FAMILIES
from attnquant.theta.names import ProjectionKey

DPI = 144
_MB = 1e6
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_COLOURS = (
    "#2a6f97",
    "#e07a5f",
    "#6a994e",
    "#8d5a97",
    "#c9a227",
    "#4f5d75",
    "#b23a48",
)
_WEIGHT_ERROR = "Error of weights: ‖W - W_eff‖ / ‖W‖, in percent"
_OUTPUT_ERROR = "Error of outputs on the calibration text (rms), in percent"
_LIGHT_ON_DARK = 0.6
"""Above this share of the colour scale, a cell's number is white."""

_NUMBERED = 40
"""With more layers than this, cells are too narrow for numbers."""

_FLOOR = 5e-3
"""Singular values below this share of the largest weight's are not drawn."""

_WIDE = 50.0
"""Ratio of perplexities above which an axis is labelled at powers of ten only."""

Value = Callable[[ProjectionAnatomy], float]


def error_map(anatomy: Anatomy) -> bytes:
    """Draw the error of each layer and family: of weights, and of outputs if known."""
    panels: list[tuple[str, Value]] = [(_WEIGHT_ERROR, lambda p: 100 * p.error)]
    if anatomy.has_output_errors:
        panels.append((_OUTPUT_ERROR, lambda p: 100 * (p.output_error or 0.0)))
    return _maps(anatomy, panels, "YlOrRd")


def sharing_map(anatomy: Anatomy) -> bytes:
    """Draw how much of each projection its band's base is, and with the term."""
    panels: list[tuple[str, Value]] = [
        (
            "The shared base alone: 1 - ‖W - W0‖² / ‖W‖², in percent",
            lambda p: 100 * (1 - p.base_error**2),
        ),
        (
            "Base and low-rank term: 1 - ‖W - W_eff‖² / ‖W‖², in percent",
            lambda p: 100 * (1 - p.error**2),
        ),
    ]
    return _maps(anatomy, panels, "YlGnBu", high=100.0)


def spectra(anatomy: Anatomy) -> bytes | None:
    """Draw singular values of residuals beside those of weights; None without any.

    Where the two curves are close, layers have nothing in common that a base could
    hold; where the residual's falls off before the rank, the term holds the rest.
    """
    families = [family for family in FAMILIES if family in anatomy.spectra]
    if not families:
        return None
    columns = min(4, len(families))
    rows = -(-len(families) // columns)
    with mpl.rc_context(_STYLE):
        figure = _figure(3.1 * columns + 0.4, 2.7 * rows + 0.9)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for place, axis in enumerate(axes.flat):
            if place >= len(families):
                axis.set_visible(False)
                continue
            _spectrum(axis, anatomy, families[place])
            if place % columns == 0:
                axis.set_ylabel("singular value,\nlargest of W = 1")
            if place + columns >= len(families):
                axis.set_xlabel("index (1 is the largest)")
        # For all panels, which share the axis.
        low, high = axes.flat[0].get_ylim()
        axes.flat[0].set_ylim(bottom=max(_FLOOR, low), top=max(2.0, high))
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper left", ncols=3, borderaxespad=0.4
        )
        return _png(figure)


def size_and_perplexity(evaluations: Sequence[EvaluationFigures]) -> bytes:
    """Draw each bundle's size against its perplexity, a panel a text."""
    names = list(dict.fromkeys(t.name for e in evaluations for t in e.texts))
    with mpl.rc_context(_STYLE):
        legend_rows = -(-len(evaluations) // 3)
        figure = _figure(5.2 * len(names) + 0.4, 4.2 + 0.28 * legend_rows)
        axes = figure.subplots(1, len(names), squeeze=False)
        for axis, name in zip(axes.flat, names, strict=True):
            _scatter(axis, name, evaluations)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=3)
        return _png(figure)


def _figure(width: float, height: float) -> Figure:
    # Without pyplot, which keeps figures in a global table.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # No version or date in it: the same figures give the same bytes.
    figure.savefig(buffer, dpi=DPI, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _maps(
    anatomy: Anatomy,
    panels: Sequence[tuple[str, Value]],
    colours: str,
    high: float | None = None,
) -> bytes:
    layout = anatomy.bundle.info.layout
    families = [f for f in FAMILIES if any(k.family == f for k in anatomy.projections)]
    a_layer = 0.46 if layout.num_layers <= _NUMBERED else 0.22
    width = max(7.0, a_layer * layout.num_layers + 2.6)
    with mpl.rc_context(_STYLE):
        figure = _figure(width, (0.34 * len(families) + 1.25) * len(panels))
        # A title keeps off the numbers of the layers above it.
        figure.set_layout_engine("constrained", hspace=0.09)
        axes = figure.subplots(len(panels), 1, squeeze=False)
        for axis, (title, value) in zip(axes.flat, panels, strict=True):
            values = np.full((len(families), layout.num_layers), np.nan)
            for key, projection in anatomy.projections.items():
                values[families.index(key.family), key.layer] = value(projection)
            _map(axis, values, families, colours, high)
            _mark_bands(axis, anatomy.projections, families)
            axis.set_title(title)
        axes.flat[-1].set_xlabel(
            "layer (lines separate bands, whose layers share a base)"
        )
        return _png(figure)


def _map(
    axis: Axes,
    values: npt.NDArray[np.float64],
    families: Sequence[str],
    colours: str,
    high: float | None,
) -> None:
    top = high if high is not None else max(float(np.nanmax(values)), 1.0)
    image = axis.imshow(values, cmap=colours, vmin=0.0, vmax=top, aspect="auto")
    axis.set_yticks(range(len(families)), families)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    numbered = values.shape[1] <= _NUMBERED
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value) or not numbered:
            continue
        colour = "white" if value > _LIGHT_ON_DARK * top else "#333333"
        axis.text(
            column, row, _short(value), ha="center", va="center",
            fontsize=7, color=colour,
        )  # fmt: skip
    bar = axis.figure.colorbar(image, ax=axis, pad=0.01, aspect=12)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}%"))


def _short(percent: float) -> str:
    return f"{percent:.1f}" if 0 < abs(percent) < 9.95 else f"{percent:.0f}"  # noqa: PLR2004


def _mark_bands(
    axis: Axes,
    projections: Mapping[ProjectionKey, ProjectionAnatomy],
    families: Sequence[str],
) -> None:
    for key, projection in projections.items():
        after = projections.get(ProjectionKey(key.layer + 1, key.family))
        if after is not None and after.base.band != projection.base.band:
            row = families.index(key.family)
            x = key.layer + 0.5
            axis.plot([x, x], [row - 0.5, row + 0.5], color="white", linewidth=2.5)


def _spectrum(axis: Axes, anatomy: Anatomy, family: str) -> None:
    chosen = sorted(anatomy.spectra[family].items())
    for place, (_, spectrum) in enumerate(chosen):
        index = np.arange(1, len(spectrum.weight) + 1)
        largest = spectrum.weight[0] or 1.0
        first = place == 0
        axis.plot(
            index, spectrum.weight / largest, color="#999999", linewidth=1,
            label="weight W" if first else None,
        )  # fmt: skip
        axis.plot(
            index, spectrum.residual / largest, color=_COLOURS[0], linewidth=1.3,
            label="residual W - W0" if first else None,
        )  # fmt: skip
    ranks = sorted({spectrum.rank for _, spectrum in chosen})
    for rank in ranks:
        axis.axvline(
            rank, color=_COLOURS[1], linestyle="--", linewidth=1.2,
            label="rank of the term" if rank == ranks[0] else None,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    layers = ", ".join(str(layer) for layer, _ in chosen)
    axis.set_title(family, fontsize=10, pad=20)
    axis.text(0, 1.03, f"layers {layers}", transform=axis.transAxes, fontsize=8.5)


def _scatter(axis: Axes, name: str, evaluations: Sequence[EvaluationFigures]) -> None:
    for place, evaluation in enumerate(evaluations):
        for text in evaluation.texts:
            if text.name == name:
                axis.scatter(
                    evaluation.bundle_bytes / _MB,
                    text.perplexity,
                    s=70,
                    color=_COLOURS[place % len(_COLOURS)],
                    marker="osD^vP"[place // len(_COLOURS) % 6],
                    edgecolor="white",
                    zorder=3,
                    label=evaluation.name,
                )
    originals = {
        (evaluation.reference_bytes, text.reference_perplexity)
        for evaluation in evaluations
        for text in evaluation.texts
        if text.name == name
    }
    for size, perplexity in sorted(originals):
        axis.axvline(size / _MB, color="#999999", linestyle=":", linewidth=1.2)
        axis.axhline(perplexity, color="#999999", linestyle=":", linewidth=1.2)
        axis.annotate(
            f"original: perplexity {perplexity:.3g}, {size / _MB:,.0f} MB",
            (0.02, perplexity),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color="#666666",
            # Over the grid's lines.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.35, high * 1.15)
    steps = (1.0,) if high / low > _WIDE else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axis.yaxis.set_major_locator(LogLocator(subs=steps))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.margins(x=0.12)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.set_xlabel("size of all tensors, MB")
    axis.set_ylabel("perplexity (log scale)")
    axis.set_title(name)
    axis.grid(visible=True, which="major", color="#eeeeee")
    axis.set_axisbelow(True)
