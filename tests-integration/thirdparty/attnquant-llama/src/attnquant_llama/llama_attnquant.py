"""Llama's decoder with shared bases, on one device."""

from __future__ import annotations

from max.nn.layer import Module

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.api import (
    AttnQuantDecoder,
    AttnQuantMLP,
    AttnQuantTextModel,
)
from attnquant.theta import ATTN_FAMILIES, MLP_FAMILIES
from attnquant_llama.layers.transformer_block import AttnQuantLlamaBlock, make_norm
from attnquant_llama.model_config import AttnQuantLlamaConfig


class AttnQuantLlama(AttnQuantDecoder):
    """Embeddings as they are, Llama's layers, and a norm of its kind."""

    def __init__(
        self, config: AttnQuantLlamaConfig, build_attention: AttentionFactory
    ) -> None:
        """Declare everything a config and its layout ask for."""
        layers = _layers(config, build_attention)
        super().__init__(config, AttnQuantTextModel(config, layers, make_norm(config)))


def _layers(
    config: AttnQuantLlamaConfig, build_attention: AttentionFactory
) -> list[Module]:
    device = config.devices[0]
    maker = config.projection_maker()
    dims = config.projection_dims()
    attention_dims = {family: dims[family] for family in ATTN_FAMILIES}
    mlp_dims = {family: dims[family] for family in MLP_FAMILIES}
    return [
        AttnQuantLlamaBlock(
            build_attention(layer, maker.make(layer, attention_dims)),
            AttnQuantMLP(
                maker.make(layer, mlp_dims),
                hidden_activation="silu",
                dtype=config.dtype,
                hidden_dim=config.hidden_size,
                feed_forward_length=config.intermediate_size,
                device=device,
            ),
            config,
        )
        for layer in range(config.num_hidden_layers)
    ]
