"""Texts run through models: comparing two of them, and calibrating one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attnquant.evaluation.measures import Comparison, Measures
from attnquant.evaluation.windows import Windows
from attnquant.theta.statistics import Accumulator, CalibrationText, InputKey

Progress = Callable[[int], None]
"""Called with the number of tokens that have just been dealt with."""


class Predictor(Protocol):
    """A model that predicts."""

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits after each token, ``[tokens, vocabulary]``.

        They need to hold only until the next call.
        """
        ...


class Observed(Protocol):
    """A model that shows what its projections are applied to."""

    def inputs(self, tokens: Sequence[int]) -> Mapping[InputKey, npt.NDArray[Any]]:
        """Return each input's features, ``[tokens, in]``."""
        ...


def compare(
    reference: Predictor,
    candidate: Predictor,
    windows: Windows,
    progress: Progress | None = None,
) -> list[Comparison]:
    """Run texts through two models.

    The first token of a window is given, all others are predicted from those before
    them in the window. One window's logits of each model are held at a time.

    Args:
        reference: What is right.
        candidate: What is looked at.
        windows: The texts.
        progress: Called as work goes on.

    Returns:
        One comparison per text, in order.

    Raises:
        CheckpointError: If the models differ in vocabulary, give what is no number,
            or there is nothing to predict.
    """
    results = []
    for text in windows.texts:
        measures = Measures()
        for window in windows.of(text):
            targets = np.asarray(window[1:], dtype=np.int64)
            expected = reference.logits(window)[:-1]
            measures.add(expected, candidate.logits(window)[:-1], targets)
            if progress:
                progress(len(window))
        results.append(measures.result())
    return results


def observe(
    model: Observed, windows: Windows, progress: Progress | None = None
) -> tuple[Accumulator, list[CalibrationText]]:
    """Run texts through a model and sum the second moments of what projections see.

    Every token of a window counts, the sequence's start included: a served model sees
    that too.

    Args:
        model: The original.
        windows: The texts.
        progress: Called as work goes on.

    Returns:
        The sums, and what they are over.

    Raises:
        CheckpointError: If the model gives what is no number.
    """
    accumulator = Accumulator()
    texts = []
    for text in windows.texts:
        tokens = 0
        for window in windows.of(text):
            for key, block in model.inputs(window).items():
                accumulator.add(key, block)
            tokens += len(window)
            if progress:
                progress(len(window))
        texts.append(CalibrationText(text.text.name, text.text.sha256, tokens))
    return accumulator, texts
