"""Checkpoint names to the graph's, and weights to bases and factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnquant.serving.weight_adapter import WeightAdapter
from attnquant.theta.prefix_map import PrefixMap
from attnquant_gemma3.plugin import PREFIX_MAP, attnquant_w0_group


def _prefix_map(config: Mapping[str, Any]) -> PrefixMap:
    del config
    return PREFIX_MAP


convert_safetensor_state_dict = WeightAdapter(
    prefix_map=_prefix_map, grouping=attnquant_w0_group
)
