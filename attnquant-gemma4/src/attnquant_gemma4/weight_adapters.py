"""Checkpoint names to the graph's, and weights to bases and factors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from max.dtype import DType
from max.graph.weights import WeightData, Weights
from max.pipelines.architectures.gemma4.weight_adapters import (
    GEMMA4_VISION_SAFETENSOR_MAP,
)

from attnquant.serving.arrays import cast
from attnquant.serving.weight_adapter import GRAPH_PREFIX, Adapted, WeightAdapter
from attnquant.settings import Settings
from attnquant_gemma4.plugin import ARCHITECTURE, TOWERS, VISION

EXPERT_NAMES = {
    "router.proj.": "moe_block.gate.gate_score.",
    "router.scale": "moe_block.gate.scale",
    "router.per_expert_scale": "moe_block.gate.per_expert_scale",
    "pre_feedforward_layernorm_2.": "moe_block.pre_expert_norm.",
    "experts.": "moe_block.experts.",
}
"""A layer's names in a checkpoint to those of MAX's mixture of experts."""

WRAPPER = "model."

_EXPERTS_RE = re.compile(rf"(layers\.\d+\.)({'|'.join(map(re.escape, EXPERT_NAMES))})")


@dataclass(frozen=True)
class Gemma4WeightAdapter(WeightAdapter):
    """The common adapter; then towers are left out and experts are named as in MAX."""

    def adapt(
        self,
        weights: Mapping[str, WeightData],
        huggingface_config: Any,
        dtype: DType | None,
        settings: Settings | None = None,
    ) -> Adapted:
        """Turn a checkpoint's or a bundle's tensors into the decoder's."""
        adapted = super().adapt(weights, huggingface_config, dtype, settings)
        left_out = tuple(GRAPH_PREFIX + tower for tower in TOWERS)
        return replace(
            adapted,
            state_dict={
                _EXPERTS_RE.sub(_expert_name, name): weight
                for name, weight in adapted.state_dict.items()
                if not name.startswith(left_out)
            },
        )


def _expert_name(match: re.Match[str]) -> str:
    return match[1] + EXPERT_NAMES[match[2]]


def vision_weights(weights: Weights, dtype: DType) -> dict[str, WeightData]:
    """Return the tensors of MAX's vision graph, under its names.

    Args:
        weights: Those of a checkpoint, or of a bundle, which keeps them as they are.
        dtype: The model's; floating-point tensors of another are cast.
    """
    found: dict[str, WeightData] = {}
    for name, weight in weights.items():
        # As the prefix map has it: canonical names are those within the wrapper.
        canonical = name.removeprefix(WRAPPER)
        if not canonical.startswith(VISION):
            continue
        graph_name = WRAPPER + canonical
        for before, after in GEMMA4_VISION_SAFETENSOR_MAP.items():
            graph_name = graph_name.replace(before, after)
        found[graph_name] = cast(weight.data(), dtype)
    return found


convert_safetensor_state_dict = Gemma4WeightAdapter(ARCHITECTURE)
