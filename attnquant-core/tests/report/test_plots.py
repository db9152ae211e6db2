"""Pictures show what they are given: their size, labels and numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from attnquant.report import plots
from attnquant.report.anatomy import Anatomy, examine
from attnquant.report.evaluations import EvaluationFigures, TextFigures
from attnquant.theta.bundle import open_bundle
from core_support.bundles import write_tiny_bundle
from core_support.tiny import SHAPES, tiny_config, tiny_weights, write_checkpoint


@contextmanager
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Collect the figures that are drawn."""
    figures: list[Figure] = []
    make = plots._figure

    def keep(width: float, height: float) -> Figure:
        figures.append(make(width, height))
        return figures[-1]

    with monkeypatch.context() as patch:
        patch.setattr(plots, "_figure", keep)
        yield figures


def drawn_texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """Draw a figure, and return the texts that were drawn with it."""
    found: list[Text] = []
    draw = Text.draw

    def record(self: Text, *arguments: Any) -> None:
        if self.get_text() and self.get_visible():
            found.append(self)
        draw(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.canvas.draw()
    return found


@pytest.fixture(scope="module")
def anatomy(tmp_path_factory: pytest.TempPathFactory) -> Anatomy:
    folder = tmp_path_factory.mktemp("plots")
    weights = tiny_weights(5)
    write_checkpoint(folder / "model", weights, tiny_config(5))
    written = write_tiny_bundle(folder, blocks=3, rank=4)
    return examine(open_bundle(written.path), weights)


def test_heat_maps_number_every_cell(
    anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for draw, value in (
        (plots.error_map, lambda p: 100 * p.error),
        (plots.sharing_map, lambda p: 100 * (1 - p.base_error**2)),
    ):
        with drawn(monkeypatch) as figures:
            draw(anatomy)
        axis = figures[0].axes[0]
        assert [t.get_text() for t in axis.get_yticklabels()] == list(SHAPES)
        cells = {tuple(map(round, t.get_position())): t.get_text() for t in axis.texts}
        for key, projection in anatomy.projections.items():
            row = list(SHAPES).index(key.family)
            shown = float(cells[key.layer, row])
            assert shown == pytest.approx(value(projection), abs=0.5), key


def test_bands_are_told_apart(
    anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with drawn(monkeypatch) as figures:
        plots.error_map(anatomy)
    lines = {line.get_xdata()[0] for line in figures[0].axes[0].lines}
    # Five layers in three bands: 0 and 1, 2 and 3, 4.
    assert lines == {1.5, 3.5}


def test_no_text_covers_another(
    anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = [
        evaluation(f"bundle-{n}", 400e6 + n * 3e6, 14.0 * 1.3**n) for n in range(7)
    ]
    with drawn(monkeypatch) as figures:
        plots.error_map(anatomy)
        plots.sharing_map(anatomy)
        plots.spectra(anatomy)
        plots.size_and_perplexity(evaluations)
    assert len(figures) == 4
    for figure in figures:
        boxes = [
            (text.get_text(), text.get_window_extent().padded(-1))
            for text in drawn_texts(figure, monkeypatch)
        ]
        assert len(boxes) > 10
        for (text, box), (other, other_box) in combinations(boxes, 2):
            assert not box.overlaps(other_box), (text, other)
            assert figure.bbox.padded(2).contains(box.x0, box.y0), text
            assert figure.bbox.padded(2).contains(box.x1, box.y1), text


def evaluation(name: str, size: float, perplexity: float) -> EvaluationFigures:
    found = TextFigures("a text", 100, 13.0, perplexity, 0.1, 0.9)
    return EvaluationFigures(Path(name), int(size), 536_000_000, (found,))


def test_size_and_perplexity_stand_where_they_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with drawn(monkeypatch) as figures:
        plots.size_and_perplexity(
            [evaluation("a", 5e8, 20.0), evaluation("b", 4e8, 40)]
        )
    (axis,) = figures[0].axes
    points = [tuple(np.asarray(c.get_offsets())[0]) for c in axis.collections]
    assert points == [(500.0, 20.0), (400.0, 40.0)]
    assert axis.get_xlabel() == "size of all tensors, MB"
    assert axis.get_ylabel() == "perplexity (log scale)"
    assert [t.get_text() for t in axis.texts] == ["original: perplexity 13, 536 MB"]


def test_a_picture_is_a_png_and_the_same_each_time(anatomy: Anatomy) -> None:
    first, second = plots.error_map(anatomy), plots.error_map(anatomy)
    assert first == second
    assert imread(io.BytesIO(first)).shape[1] >= 7 * plots.DPI


def test_without_low_rank_terms_there_are_no_spectra(tmp_path: Path) -> None:
    weights = tiny_weights(3)
    write_checkpoint(tmp_path / "model", weights, tiny_config(3))
    written = write_tiny_bundle(tmp_path, blocks=3, rank=None)
    assert plots.spectra(examine(open_bundle(written.path), weights)) is None
