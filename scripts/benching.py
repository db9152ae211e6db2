"""What the benchmarks share, on Linux: runs in turn, the bandwidth of memory, reports.

Machines differ and are shared: a ratio within a run says something, a time does not.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#2a6f97", "#e07a5f", "#6a994e", "#8d5a97", "#c9a227", "#4f5d75")

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 512 << 20
"""Where the system does not tell its caches: more than CPUs of the day have."""

_BAR_INCHES = 0.24
_PANEL_INCHES = 1.15
_PANELS_IN_A_COLUMN = 2


def in_turn(
    cases: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Collect `rounds` values of each case, taken in turn so that noise hits all alike.

    Every case runs once before, and that value is dropped. The order is reversed from
    round to round, so that a machine that grows slower favours none.
    """
    values: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for index in range(rounds):
        for name in list(cases) if index % 2 == 0 else list(cases)[::-1]:
            values[name].append(cases[name]())
    return values


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Time each case `rounds` times, as `in_turn` does.

    Returns:
        The seconds of every run, by case.
    """
    return in_turn(
        {name: partial(seconds_of, run) for name, run in cases.items()}, rounds
    )


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each case."""
    return {name: statistics.median(times) for name, times in seconds.items()}


class Copy:
    """A copy of arrays larger than any cache, as a case to time.

    Attributes:
        nbytes: Bytes read plus bytes written by one call.
    """

    def __init__(self, threads: int, cache: int | None = None) -> None:
        """Allocate the arrays.

        Args:
            threads: How many copy at once, each its own pair of arrays.
            cache: Size of the largest cache in bytes, by default what the system says.
        """
        cache = largest_cache() if cache is None else cache
        # Sources alone fill the cache, sources and targets fill it twice.
        length = -(-cache // threads)
        self._pairs = [
            (np.ones(length, np.uint8), np.zeros(length, np.uint8))
            for _ in range(threads)
        ]
        self._pool = ThreadPoolExecutor(threads)
        self.nbytes = 2 * length * threads

    def __call__(self) -> None:
        """Copy once; numpy lets go of the interpreter lock meanwhile."""
        # A list, so that what a thread raises is raised here.
        list(self._pool.map(lambda pair: np.copyto(pair[1], pair[0]), self._pairs))


def copy_bandwidth(threads: int, rounds: int = 5) -> float:
    """Return the measured bandwidth of copying, in bytes read and written a second.

    Args:
        threads: How many copy at once.
        rounds: Of how many copies the median is taken.
    """
    copy = Copy(threads)
    return copy.nbytes / medians(interleaved({"copy": copy}, rounds))["copy"]


def largest_cache(caches: Path = _CACHES) -> int:
    """Return the size of the largest cache in bytes, as Linux tells it."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max(
        (int(size[:-1]) * units[size[-1]] for size in sizes), default=_UNKNOWN_CACHE
    )


def machine() -> dict[str, Any]:
    """Return what figures depend on: processor, cores that may be used, cache."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "largest_cache_bytes": largest_cache(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def write_report(out: Path, name: str, report: Mapping[str, Any]) -> Path:
    """Write ``out/name.json``: the report, after what machine it was made on."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    content = {"machine": machine(), **report}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Panel:
    """Horizontal bars of one quantity.

    Attributes:
        title: What is shown.
        axis: The quantity and its unit.
        series: For each series, drawn in a colour of its own, values by label.
        mark: Where a line is drawn across, such as at the baseline's 1.
    """

    title: str
    axis: str
    series: Mapping[str, Mapping[str, float]]
    mark: float | None = None

    @property
    def labels(self) -> list[str]:
        """The labels of all series, in the order in which they first appear."""
        return list(
            dict.fromkeys(label for row in self.series.values() for label in row)
        )


def write_bars(out: Path, name: str, panels: Sequence[Panel]) -> Path:
    """Draw panels into ``out/name.png``: two beside each other if there are many."""
    columns = 2 if len(panels) > _PANELS_IN_A_COLUMN else 1
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [
        max(
            _PANEL_INCHES + _BAR_INCHES * len(p.labels) * (len(p.series) + 0.6)
            for p in row
        )
        for row in rows
    ]
    # Without pyplot, which keeps figures in a global table.
    figure = Figure(figsize=(9.0 * columns, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for axis, panel in zip_longest(axes.flat, panels):
        if panel is None:
            axis.set_axis_off()
        else:
            _draw(axis, panel)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.png"
    figure.savefig(path, dpi=144)
    return path


def _draw(axis: Axes, panel: Panel) -> None:
    labels = panel.labels
    height = 0.8 / len(panel.series)
    for place, (series, values) in enumerate(panel.series.items()):
        rows = [
            labels.index(label) + (place - (len(panel.series) - 1) / 2) * height
            for label in values
        ]
        bars = axis.barh(
            rows,
            list(values.values()),
            height,
            color=COLOURS[place % len(COLOURS)],
            label=series,
        )
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    if panel.mark is not None:
        axis.axvline(panel.mark, color="#333333", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.1, y=0.02)
    axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel(panel.axis)
    axis.spines[["top", "right"]].set_visible(False)
    if len(panel.series) > 1:
        axis.legend(fontsize=8, frameon=False, loc="best")
