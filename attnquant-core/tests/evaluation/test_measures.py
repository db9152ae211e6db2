"""Measures equal their definitions in float64, however positions come in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import CheckpointError
from attnquant.evaluation.measures import Comparison, Measures

Array = npt.NDArray[Any]


def by_definition(reference: Array, candidate: Array, targets: Array) -> Comparison:
    """Compute every figure in float64, row by row and as the textbooks have it."""

    def softmax(row: Array) -> Array:
        powers = np.exp(row.astype(np.float64) - float(row.max()))
        return np.asarray(powers / powers.sum())

    log_p, log_q, kls, agreed = [], [], [], 0
    for x, y, target in zip(reference, candidate, targets, strict=True):
        p, q = softmax(x), softmax(y)
        log_p.append(math.log(p[target]))
        log_q.append(math.log(q[target]))
        kls.append(float(np.sum(p * np.log(p / q))))
        agreed += int(np.argmax(p) == np.argmax(q))
    count = len(targets)
    return Comparison(
        tokens=count,
        reference_perplexity=math.exp(-sum(log_p) / count),
        perplexity=math.exp(-sum(log_q) / count),
        mean_kl=sum(kls) / count,
        max_kl=max(kls),
        top1_agreement=agreed / count,
        max_log_probability_difference=max(
            abs(a - b) for a, b in zip(log_p, log_q, strict=True)
        ),
    )


@st.composite
def predictions(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, vocabulary = draw(st.integers(1, 40)), draw(st.integers(2, 50))
    scale = draw(st.sampled_from([0.1, 1.0, 8.0]))
    offset = draw(st.sampled_from([0.0, -30.0, 100.0]))
    reference = scale * rng.standard_normal((rows, vocabulary)) + offset
    noise = draw(st.sampled_from([0.0, 0.01, 1.0]))
    candidate = reference + noise * rng.standard_normal((rows, vocabulary))
    targets = rng.integers(0, vocabulary, rows)
    return reference.astype(np.float32), candidate.astype(np.float32), targets


# Arrays are printed where an example is shown, which Hypothesis warns of.
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@given(predictions())
def test_figures_equal_their_definitions(case: tuple[Array, Array, Array]) -> None:
    measures = Measures()
    measures.add(*case)
    expected, found = by_definition(*case), measures.result()
    for field, value in dataclasses.asdict(expected).items():
        assert getattr(found, field) == pytest.approx(value, rel=2e-6, abs=2e-6), field
    assert found.ratio == pytest.approx(
        expected.perplexity / expected.reference_perplexity, rel=4e-6
    )


@given(predictions(), st.integers(0, 40))
def test_it_makes_no_difference_how_positions_come_in(
    case: tuple[Array, Array, Array], first: int
) -> None:
    whole, parts = Measures(), Measures()
    whole.add(*case)
    for rows in (slice(first), slice(first, None)):
        parts.add(*(array[rows] for array in case))
    found = dataclasses.asdict(parts.result())
    assert found == pytest.approx(dataclasses.asdict(whole.result()), rel=1e-12)


@given(predictions())
def test_a_model_is_no_way_off_itself(case: tuple[Array, Array, Array]) -> None:
    reference, _, targets = case
    measures = Measures()
    measures.add(reference, reference.copy(), targets)
    found = measures.result()
    assert (found.ratio, found.mean_kl, found.max_kl) == (1.0, 0.0, 0.0)
    assert (found.top1_agreement, found.max_log_probability_difference) == (1.0, 0.0)


def test_a_worse_model_has_the_higher_perplexity() -> None:
    right = np.array([[5.0, 0.0, 0.0]], dtype=np.float32)
    measures = Measures()
    measures.add(right, right[:, ::-1], np.array([0]))
    found = measures.result()
    assert found.ratio > 100
    assert found.top1_agreement == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_refused(bad: float) -> None:
    logits = np.zeros((2, 3), dtype=np.float32)
    spoilt = logits.copy()
    spoilt[1, 2] = bad
    with pytest.raises(CheckpointError, match="logits: expected finite values"):
        Measures().add(logits, spoilt, np.array([0, 1]))


def test_two_vocabularies_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"shape \[2, 3\], found \[2, 4\]"):
        Measures().add(np.zeros((2, 3)), np.zeros((2, 4)), np.array([0, 1]))


def test_nothing_has_no_perplexity() -> None:
    with pytest.raises(CheckpointError, match="at least one token to predict"):
        Measures().result()
