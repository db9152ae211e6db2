"""Gemma 3 keeps what every model package must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attnquant.testing import ModelConformance, Setting
from attnquant.testing.metrics import Array
from gemma3_support.oracle import forward
from gemma3_support.tiny import tiny_config, tiny_weights, write_tiny_checkpoint


class TestGemma3(ModelConformance):
    """Eight layers, of which the sixth has full attention; a tied head."""

    architecture = "Gemma3ForCausalLM"
    config = tiny_config()
    setting = Setting(3, 4)

    def weights(self) -> dict[str, Array]:
        return tiny_weights(self.config, seed=0)

    def write_checkpoint(self, directory: Path) -> Path:
        return write_tiny_checkpoint(directory)

    def reference(self, weights: Mapping[str, Array], tokens: Sequence[int]) -> Array:
        return forward(weights, self.config, tokens)
