"""Llama's pipeline model."""

from __future__ import annotations

from typing import Any, ClassVar

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.api import AttnQuantTextPipelineModel, WeightAdapter
from attnquant_llama.llama_attnquant import AttnQuantLlama
from attnquant_llama.model_config import AttnQuantLlamaConfig
from attnquant_llama.weight_adapters import convert_safetensor_state_dict


class AttnQuantLlamaModel(AttnQuantTextPipelineModel):
    """Core's pipeline model of text around Llama's decoder."""

    model_config_cls: ClassVar[type[Any]] = AttnQuantLlamaConfig
    weight_adapter: ClassVar[WeightAdapter] = convert_safetensor_state_dict

    def build_decoder(
        self, model_config: AttnQuantLlamaConfig, build_attention: AttentionFactory
    ) -> AttnQuantLlama:
        """Build the decoder's module."""
        return AttnQuantLlama(model_config, build_attention)
