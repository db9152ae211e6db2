"""Checkpoint names to the graph's, and weights to bases and factors."""

from __future__ import annotations

from attnquant.serving.weight_adapter import WeightAdapter
from attnquant_gemma3.plugin import ARCHITECTURE

convert_safetensor_state_dict = WeightAdapter(ARCHITECTURE)
