"""Prefix maps: every tensor gets one canonical name, is ignored, or is an error."""

from __future__ import annotations

import pytest

from attnquant.errors import CheckpointError
from attnquant.theta.prefix_map import PrefixMap

MAP = PrefixMap(
    prefixes={"model.": "", "model.vision.": "vision.", "lm_head.": "lm_head."},
    ignored=("*.inv_freq",),
)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.norm.weight", "norm.weight"),
        ("model.vision.norm.weight", "vision.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.rotary.inv_freq", None),
    ],
)
def test_the_longest_prefix_wins(name: str, canonical: str | None) -> None:
    assert canonical == MAP.canonical(name)


@pytest.mark.parametrize("name", ["audio.weight", "Model.norm.weight", "lm_head", ""])
def test_a_name_that_no_prefix_covers_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        MAP.canonical(name)
    error = caught.value
    assert error.subject == name
    assert "'model.', 'model.vision.', 'lm_head.'" in error.expected
    assert "prefix map does not cover" in error.found


def test_renaming_leads_from_canonical_to_checkpoint_names() -> None:
    names = ["model.norm.weight", "model.rotary.inv_freq", "lm_head.weight"]
    expected = {"norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
    assert expected == MAP.rename(names)


def test_two_names_that_become_one_are_an_error() -> None:
    twice = PrefixMap({"model.": "", "language_model.model.": ""})
    with pytest.raises(CheckpointError) as caught:
        twice.rename(["model.norm.weight", "language_model.model.norm.weight"])
    error = caught.value
    assert error.subject == "language_model.model.norm.weight"
    assert error.expected == "one tensor for norm.weight"
    assert error.found == "model.norm.weight as well"
