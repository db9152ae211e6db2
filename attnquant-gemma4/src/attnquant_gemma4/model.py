"""Gemma 4's pipeline model."""

from __future__ import annotations

from typing import Any, ClassVar

from max.pipelines.architectures.gemma3.model import Gemma3Model

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.pipeline_model import AttnQuantPipelineModelMixin
from attnquant.serving.weight_adapter import WeightAdapter
from attnquant_gemma4.gemma4_attnquant import AttnQuantGemma4
from attnquant_gemma4.model_config import AttnQuantGemma4Config, decoder_config
from attnquant_gemma4.weight_adapters import convert_safetensor_state_dict


class AttnQuantGemma4Model(AttnQuantPipelineModelMixin, Gemma3Model):
    """MAX's pipeline model of Gemma decoders around the AttnQuant decoder.

    MAX's Gemma 4 wraps its decoder in a model that also encodes images; for text,
    its Gemma 3 is all that is needed.
    """

    model_config_cls: ClassVar[type[Any]] = AttnQuantGemma4Config
    weight_adapter: ClassVar[WeightAdapter] = convert_safetensor_state_dict

    def build_decoder(
        self, model_config: AttnQuantGemma4Config, build_attention: AttentionFactory
    ) -> AttnQuantGemma4:
        """Build the decoder's module."""
        return AttnQuantGemma4(model_config, build_attention)

    def _hf_config_for_weights(self) -> Any:
        return decoder_config(self.huggingface_config)

    def _create_model_config(self, state_dict: dict[str, Any]) -> AttnQuantGemma4Config:
        decoder = self._hf_config_for_weights()
        config = AttnQuantGemma4Config.initialize_from_config(
            self.pipeline_config, decoder, max_seq_len=self.max_seq_len
        )
        config.finalize(
            huggingface_config=decoder,
            state_dict=state_dict,
            return_logits=self.return_logits,
        )
        self.finish_config(config)
        return config
