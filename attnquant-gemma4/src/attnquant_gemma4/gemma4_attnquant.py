"""Gemma 4's decoder with shared bases, on one device."""

from __future__ import annotations

from max.nn.layer import Module
from max.pipelines.architectures.gemma4.layers.rms_norm import Gemma4RMSNorm

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.decoder import AttnQuantDecoder, AttnQuantTextModel
from attnquant.serving.mlp import AttnQuantMLP
from attnquant.serving.projections import ProjectionMaker
from attnquant.theta.families import ATTN_FAMILIES, MLP_FAMILIES
from attnquant_gemma4.layers.experts import AttnQuantGemma4Experts
from attnquant_gemma4.layers.transformer_block import AttnQuantGemma4Block
from attnquant_gemma4.model_config import AttnQuantGemma4Config


class AttnQuantGemma4(AttnQuantDecoder):
    """Scaled embeddings, Gemma 4's layers, and a norm of its kind."""

    def __init__(
        self, config: AttnQuantGemma4Config, build_attention: AttentionFactory
    ) -> None:
        """Declare everything a config and its layout ask for."""
        text_model = AttnQuantTextModel(
            config,
            _layers(config, build_attention),
            Gemma4RMSNorm(config.hidden_size, config.dtype, config.rms_norm_eps),
            embed_scale=config.hidden_size**0.5,
        )
        super().__init__(config, text_model)


def _layers(
    config: AttnQuantGemma4Config, build_attention: AttentionFactory
) -> list[Module]:
    maker = ProjectionMaker(
        config.theta_layout, config.formulation, config.dtype, config.devices[0]
    )
    layers: list[Module] = []
    for layer in range(config.num_hidden_layers):
        dims = config.projection_dims(layer)
        attention_dims = {name: dims[name] for name in ATTN_FAMILIES if name in dims}
        mlp_dims = {name: dims[name] for name in MLP_FAMILIES}
        block = AttnQuantGemma4Block(
            build_attention(layer, maker.make(layer, attention_dims)),
            AttnQuantMLP(
                maker.make(layer, mlp_dims),
                hidden_activation=config.hidden_activation,
                dtype=config.dtype,
                hidden_dim=config.hidden_size,
                feed_forward_length=config.intermediate_size,
                device=config.devices[0],
            ),
            _experts(config),
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
            dtype=config.dtype,
        )
        layers.append(block)
    return layers


def _experts(config: AttnQuantGemma4Config) -> AttnQuantGemma4Experts | None:
    if not config.enable_moe_block:
        return None
    return AttnQuantGemma4Experts(
        num_experts=config.num_experts,
        top_k=config.top_k_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        eps=config.rms_norm_eps,
        dtype=config.dtype,
        device=config.devices[0],
    )
