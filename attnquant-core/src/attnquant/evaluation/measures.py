"""How far one model's predictions are from another's, summed over many positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnquant.errors import CheckpointError

Array = npt.NDArray[Any]

_ROWS = 16
"""Positions reduced at a time: of 262144 logits each, 16 MB an array."""


@dataclass(frozen=True)
class Comparison:
    """What two models make of the same tokens.

    Attributes:
        tokens: Over how many predicted tokens.
        reference_perplexity: ``exp`` of the reference's mean negative log-probability
            (in nats) of the token that came.
        perplexity: The same of the model that is looked at.
        mean_kl: Mean of ``KL(reference || model)`` in nats.
        max_kl: The worst position's.
        top1_agreement: Share of positions at which both have the same likeliest token.
        max_log_probability_difference: The largest difference, in nats, between the
            two log-probabilities of a token that came.
    """

    tokens: int
    reference_perplexity: float
    perplexity: float
    mean_kl: float
    max_kl: float
    top1_agreement: float
    max_log_probability_difference: float

    @property
    def ratio(self) -> float:
        """The perplexity as a multiple of the reference's; 1 is as good."""
        return self.perplexity / self.reference_perplexity


class Measures:
    """Accumulates a `Comparison`, a few positions at a time."""

    def __init__(self) -> None:
        self._tokens = 0
        self._reference = self._candidate = 0.0
        self._kl = self._max_kl = 0.0
        self._agreed = 0
        self._max_difference = 0.0

    def add(self, reference: Array, candidate: Array, targets: Array) -> None:
        """Count some positions in.

        Args:
            reference: Logits ``[rows, vocabulary]`` in float32.
            candidate: The other model's, of the same shape.
            targets: The token ``[rows]`` that came after each position.

        Raises:
            CheckpointError: If the shapes are not the same, or logits not finite.
        """
        if reference.shape != candidate.shape:
            raise CheckpointError(
                "logits",
                expected=f"the reference's shape {list(reference.shape)}",
                found=str(list(candidate.shape)),
                hint="The models must have one vocabulary.",
            )
        for first in range(0, len(targets), _ROWS):
            rows = slice(first, first + _ROWS)
            self._add(reference[rows], candidate[rows], targets[rows])

    def _add(self, reference: Array, candidate: Array, targets: Array) -> None:
        p = _Distribution(reference)
        q = _Distribution(candidate)
        # Σ p·(log(p/q)), the normalisers taken out of the sum. Each is known to
        # about 1e-7, so that two equal models can come out that far below nothing.
        apart = np.einsum(
            "rv,rv->r", p.exponentials, p.shifted - q.shifted, dtype=np.float64
        )
        kl = np.maximum(apart / p.total - (p.log_total - q.log_total), 0.0)
        of_p, of_q = p.log_probabilities(targets), q.log_probabilities(targets)
        self._tokens += len(targets)
        self._reference -= float(of_p.sum())
        self._candidate -= float(of_q.sum())
        self._kl += float(kl.sum())
        self._max_kl = max(self._max_kl, float(kl.max()))
        self._agreed += int((p.likeliest == q.likeliest).sum())
        difference = float(np.abs(of_p - of_q).max())
        self._max_difference = max(self._max_difference, difference)

    def result(self) -> Comparison:
        """Return the figures so far.

        Raises:
            CheckpointError: If nothing was added.
        """
        if not self._tokens:
            raise CheckpointError(
                "text", expected="at least one token to predict", found="none"
            )
        return Comparison(
            tokens=self._tokens,
            reference_perplexity=math.exp(self._reference / self._tokens),
            perplexity=math.exp(self._candidate / self._tokens),
            mean_kl=self._kl / self._tokens,
            max_kl=self._max_kl,
            top1_agreement=self._agreed / self._tokens,
            max_log_probability_difference=self._max_difference,
        )


class _Distribution:
    """Softmax of logits ``[rows, vocabulary]``, with its parts at hand.

    Exponentials are formed in float32 and summed in float64. What float32 rounds off
    far from the largest logit is weighted by next to nothing there; a token that came
    may lie as far, and its own log-probability is therefore formed in float64.
    """

    def __init__(self, logits: Array) -> None:
        self.likeliest = logits.argmax(axis=1)
        highest = np.take_along_axis(logits, self.likeliest[:, None], axis=1)
        if not np.isfinite(highest).all() or np.isnan(logits.sum()):
            raise CheckpointError(
                "logits", expected="finite values", found="a NaN or an infinity"
            )
        self._logits, self._highest = logits, highest[:, 0].astype(np.float64)
        self.shifted = logits - highest
        self.exponentials = np.exp(self.shifted)
        self.total = self.exponentials.sum(axis=1, dtype=np.float64)
        self.log_total = np.log(self.total)

    def log_probabilities(self, tokens: Array) -> Array:
        chosen = np.take_along_axis(self._logits, tokens[:, None], axis=1)[:, 0]
        return np.asarray(chosen.astype(np.float64) - self._highest - self.log_total)
