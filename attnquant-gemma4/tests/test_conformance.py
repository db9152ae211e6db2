"""Gemma 4 keeps what every model package must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attnquant.testing import ModelConformance, Setting
from attnquant.testing.metrics import Array
from gemma4_support.oracle import forward
from gemma4_support.tiny import (
    SPECIAL_TOKENS,
    tiny_config,
    tiny_weights,
    write_tiny_checkpoint,
)


class TestGemma4(ModelConformance):
    """Six layers, of which the last has full attention, whose keys are its values."""

    architecture = "Gemma4ForConditionalGeneration"
    config = tiny_config()
    setting = Setting(4, 4)
    special_tokens = SPECIAL_TOKENS

    def weights(self) -> dict[str, Array]:
        return tiny_weights(self.config, seed=0)

    def write_checkpoint(self, directory: Path) -> Path:
        return write_tiny_checkpoint(directory)

    def reference(self, weights: Mapping[str, Array], tokens: Sequence[int]) -> Array:
        return forward(weights, self.config, tokens)
