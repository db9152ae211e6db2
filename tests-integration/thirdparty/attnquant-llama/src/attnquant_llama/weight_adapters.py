"""Checkpoint names to the graph's, and weights to bases and factors."""

from __future__ import annotations

from attnquant.serving.api import WeightAdapter
from attnquant_llama.plugin import ARCHITECTURE

convert_safetensor_state_dict = WeightAdapter(ARCHITECTURE)
