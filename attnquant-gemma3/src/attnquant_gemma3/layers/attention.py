"""Gemma 3's attention around given projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from max.nn.kv_cache import KVCacheParams, MultiKVCacheParams
from max.nn.linear import Linear
from max.nn.rotary_embedding import (
    Llama3RopeScalingParams,
    Llama3RotaryEmbedding,
)
from max.pipelines.architectures.gemma3.layers.attention import Gemma3Attention
from max.pipelines.architectures.gemma3.layers.rms_norm import Gemma3RMSNorm

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.linear import StackedProjection

if TYPE_CHECKING:
    from attnquant_gemma3.model_config import AttnQuantGemma3Config

QKV = ("q_proj", "k_proj", "v_proj")


class AttnQuantGemma3Attention(Gemma3Attention):
    """MAX's Gemma 3 attention with projections given and norms in the model's dtype."""

    def __init__(
        self,
        config: AttnQuantGemma3Config,
        projections: Mapping[str, Linear],
        *,
        rope_global: Llama3RotaryEmbedding,
        rope_local: Llama3RotaryEmbedding,
        kv_params: KVCacheParams,
        layer_idx: int,
        is_sliding: bool,
    ) -> None:
        """Build one layer's attention.

        Args:
            config: The model's.
            projections: `q_proj`, `k_proj`, `v_proj` and `o_proj`.
            rope_global: Rotary table of full layers.
            rope_local: Rotary table of sliding layers.
            kv_params: The cache of this kind of layer.
            layer_idx: Which layer of that cache.
            is_sliding: Whether this layer sees a window only.
        """
        scalar = config.query_pre_attn_scalar
        super().__init__(
            rope_global=rope_global,
            rope_local=rope_local,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            hidden_size=config.hidden_size,
            kv_params=kv_params,
            layer_idx=layer_idx,
            is_sliding=is_sliding,
            dtype=config.dtype,
            devices=config.devices,
            scale=None if scalar is None else scalar**-0.5,
            has_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
            local_window_size=config.sliding_window,
        )
        # MAX has these in bfloat16 whatever the config says.
        self.q_norm = Gemma3RMSNorm(config.head_dim, config.dtype, config.rms_norm_eps)
        self.k_norm = Gemma3RMSNorm(config.head_dim, config.dtype, config.rms_norm_eps)
        self.qkv_proj = StackedProjection(QKV, [projections[name] for name in QKV])
        self.o_proj = projections["o_proj"]


def attention_factory(config: AttnQuantGemma3Config) -> AttentionFactory:
    """Return the attention layer factory of a model.

    Args:
        config: The model's. Rotary tables are built from it once, for all layers.
    """
    scaling = config.rope_scaling
    rope_global = _rope(
        config,
        config.rope_theta,
        # With both factors this high, Llama 3's scaling is the linear one.
        None
        if scaling is None
        else Llama3RopeScalingParams(
            factor=scaling.factor,
            low_freq_factor=1e38,
            high_freq_factor=1e38,
            orig_max_position=config.max_position_embeddings,
        ),
    )
    rope_local = _rope(config, config.rope_local_base_freq, None)

    def build(
        layer: int, projections: Mapping[str, Linear]
    ) -> AttnQuantGemma3Attention:
        kind = config.layer_types[layer]
        return AttnQuantGemma3Attention(
            config,
            projections,
            rope_global=rope_global,
            rope_local=rope_local,
            kv_params=kv_params_for(config, kind),
            layer_idx=config.layer_types[:layer].count(kind),
            is_sliding=kind == "sliding_attention",
        )

    return build


def kv_params_for(config: AttnQuantGemma3Config, kind: str) -> KVCacheParams:
    """Return the cache parameters of one kind of layer."""
    assert isinstance(config.kv_params, MultiKVCacheParams)
    params = config.kv_params.children[kind]
    assert isinstance(params, KVCacheParams)
    return params


def _rope(
    config: AttnQuantGemma3Config,
    theta: float,
    scaling: Llama3RopeScalingParams | None,
) -> Llama3RotaryEmbedding:
    return Llama3RotaryEmbedding(
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        theta=theta,
        max_seq_len=config.max_position_embeddings,
        head_dim=config.head_dim,
        interleaved=False,
        scaling_params=scaling,
    )
