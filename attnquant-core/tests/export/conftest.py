"""Fixtures of the exports' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.theta.bundle import Bundle, open_bundle
from attnquant.theta.prefix_map import PrefixMap
from core_support.bundles import write_tiny_bundle
from core_support.tiny import tiny_config, tiny_weights, write_checkpoint

PREFIX_MAP = PrefixMap(
    {"model.": "", "lm_head.": "lm_head.", "wrapped.model.": ""}, ("*.inv_freq",)
)


@pytest.fixture
def prefix_map() -> PrefixMap:
    return PREFIX_MAP


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a checkpoint of five layers, with a tokenizer beside it."""
    path = write_checkpoint(tmp_path / "model", tiny_weights(5), tiny_config(5))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def shared(model: Path) -> Bundle:
    """Make a bundle in which one layer has a base of its own, and four share."""
    written = write_tiny_bundle(model.parent, blocks=3, rank=4, dtype="float32")
    return open_bundle(written.path)


@pytest.fixture
def passthrough(model: Path) -> Bundle:
    written = write_tiny_bundle(model.parent, blocks=5, rank=None)
    return open_bundle(written.path)
