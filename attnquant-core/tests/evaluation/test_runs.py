"""Texts through models: what is asked of them, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attnquant.errors import CheckpointError
from attnquant.evaluation.runs import compare, observe
from attnquant.evaluation.windows import Tokens, Windows, cut
from attnquant.texts import Text
from attnquant.theta.statistics import InputKey, SourceModel, open_statistics

VOCABULARY = 11
QKV, DOWN = InputKey(0, "qkv"), InputKey(0, "down")


class Fake:
    """A model whose answers depend on every token up to a position, and on a seed."""

    def __init__(self, seed: int = 0) -> None:
        self.tables = np.random.default_rng(seed).standard_normal((3, VOCABULARY, 4))
        self.head = np.random.default_rng(seed + 1).standard_normal((4, VOCABULARY))
        self.seen: list[tuple[int, ...]] = []

    def hidden(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self.seen.append(tuple(tokens))
        rows = self.tables[0][list(tokens)]
        return np.asarray(rows.cumsum(axis=0), dtype=np.float32)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        return np.asarray(self.hidden(tokens) @ self.head, dtype=np.float32)

    def inputs(self, tokens: Sequence[int]) -> dict[InputKey, npt.NDArray[Any]]:
        x = self.hidden(tokens)
        return {QKV: x, DOWN: np.hstack([x, 2 * x])}


@pytest.fixture
def windows() -> Windows:
    rng = np.random.default_rng(7)
    texts = [
        Tokens(Text(name, name), (2,), tuple(map(int, rng.integers(3, VOCABULARY, n))))
        for name, n in [("first", 23), ("second", 6)]
    ]
    return cut(texts, 8)


def test_every_token_of_a_text_is_predicted_once(windows: Windows) -> None:
    found = compare(Fake(), Fake(3), windows)
    assert [comparison.tokens for comparison in found] == [23, 6]


def test_perplexity_is_of_the_next_token_given_those_before(windows: Windows) -> None:
    model = Fake()
    found = compare(model, Fake(3), windows)[1]
    (window,) = windows.of(windows.texts[1])
    surprise = 0.0
    for position, token in enumerate(window[1:]):
        logits = model.logits(window[: position + 1])[-1].astype(float)
        surprise -= logits[token] - np.log(np.exp(logits).sum())
    expected = np.exp(surprise / 6)
    assert found.reference_perplexity == pytest.approx(expected, rel=1e-5)
    assert found.perplexity != pytest.approx(expected, rel=1e-2)


def test_moments_are_over_every_token_that_was_run(
    windows: Windows, tmp_path: Path
) -> None:
    model = Fake()
    accumulator, texts = observe(model, windows)
    assert [(text.name, text.tokens) for text in texts] == [
        ("first", 27),
        ("second", 7),
    ]
    assert [text.sha256 for text in texts] == [
        text.text.sha256 for text in windows.texts
    ]
    accumulator.write(tmp_path / "file", SourceModel("m", "", {"a": "b"}), texts)
    statistics = open_statistics(tmp_path / "file")
    assert dict(statistics.tokens) == {QKV: 34, DOWN: 34}
    rows = np.vstack([model.inputs(run)[QKV] for run in list(model.seen)])
    expected = rows.T.astype(float) @ rows / len(rows)
    np.testing.assert_allclose(statistics.moment(QKV), expected, rtol=1e-5)


def test_progress_adds_up_to_what_was_announced(windows: Windows) -> None:
    steps: list[int] = []
    compare(Fake(), Fake(), windows, steps.append)
    assert sum(steps) == windows.total
    steps.clear()
    observe(Fake(), windows, steps.append)
    assert sum(steps) == windows.total


def test_a_text_without_tokens_is_refused() -> None:
    nothing = cut([Tokens(Text("empty", ""), (2,), ())], 8)
    with pytest.raises(CheckpointError, match="at least one token"):
        compare(Fake(), Fake(), nothing)
