"""Gemma 3's decoder with shared bases, on one device."""

from __future__ import annotations

from max.nn.layer import Module
from max.pipelines.architectures.gemma3.layers.rms_norm import Gemma3RMSNorm

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.decoder import AttnQuantDecoder, AttnQuantTextModel
from attnquant.serving.mlp import AttnQuantMLP
from attnquant.theta.families import ATTN_FAMILIES, MLP_FAMILIES
from attnquant_gemma3.layers.transformer_block import AttnQuantGemma3Block
from attnquant_gemma3.model_config import AttnQuantGemma3Config


class AttnQuantGemma3(AttnQuantDecoder):
    """Scaled embeddings, Gemma 3's layers, and a norm of its kind."""

    def __init__(
        self, config: AttnQuantGemma3Config, build_attention: AttentionFactory
    ) -> None:
        """Declare everything a config and its layout ask for."""
        text_model = AttnQuantTextModel(
            config,
            _layers(config, build_attention),
            Gemma3RMSNorm(config.hidden_size, config.dtype, config.rms_norm_eps),
            embed_scale=config.hidden_size**0.5,
        )
        super().__init__(config, text_model)


def _layers(
    config: AttnQuantGemma3Config, build_attention: AttentionFactory
) -> list[Module]:
    maker = config.projection_maker()
    dims = config.projection_dims()
    attention_dims = {family: dims[family] for family in ATTN_FAMILIES}
    mlp_dims = {family: dims[family] for family in MLP_FAMILIES}
    return [
        AttnQuantGemma3Block(
            build_attention(
                layer,
                maker.make(layer, attention_dims, has_bias=config.attention_bias),
            ),
            AttnQuantMLP(
                maker.make(layer, mlp_dims),
                hidden_activation=config.hidden_activation,
                dtype=config.dtype,
                hidden_dim=config.hidden_size,
                feed_forward_length=config.intermediate_size,
                device=config.devices[0],
            ),
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
            dtype=config.dtype,
        )
        for layer in range(config.num_hidden_layers)
    ]
