"""Gemma 3's pipeline model."""

from __future__ import annotations

from typing import Any, ClassVar

from max.pipelines.architectures.gemma3.model import Gemma3Model

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.pipeline_model import AttnQuantPipelineModelMixin
from attnquant.serving.weight_adapter import WeightAdapter
from attnquant_gemma3.gemma3_attnquant import AttnQuantGemma3
from attnquant_gemma3.model_config import AttnQuantGemma3Config
from attnquant_gemma3.weight_adapters import convert_safetensor_state_dict


class AttnQuantGemma3Model(AttnQuantPipelineModelMixin, Gemma3Model):
    """MAX's Gemma 3 pipeline model around the AttnQuant decoder."""

    model_config_cls: ClassVar[type[Any]] = AttnQuantGemma3Config
    weight_adapter: ClassVar[WeightAdapter] = convert_safetensor_state_dict

    def build_decoder(
        self, model_config: AttnQuantGemma3Config, build_attention: AttentionFactory
    ) -> AttnQuantGemma3:
        """Build the decoder's module."""
        return AttnQuantGemma3(model_config, build_attention)

    def _create_model_config(self, state_dict: dict[str, Any]) -> AttnQuantGemma3Config:
        # MAX names its own config class here, whatever `model_config_cls` says.
        config = AttnQuantGemma3Config.initialize_from_config(
            self.pipeline_config,
            self._hf_config_for_weights(),
            max_seq_len=self.max_seq_len,
        )
        config.finalize(
            huggingface_config=self._hf_config_for_weights(),
            state_dict=state_dict,
            return_logits=self.return_logits,
        )
        self.finish_config(config)
        return config
