"""Gemma 4's attention around given projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from max.nn.kv_cache import KVCacheParams, MultiKVCacheParams
from max.nn.linear import Linear
from max.nn.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding
from max.pipelines.architectures.gemma4.layers.attention import Gemma4Attention
from max.pipelines.architectures.gemma4.layers.rotary_embedding import (
    ProportionalRotaryEmbedding,
    ProportionalScalingParams,
)

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.linear import StackedProjection
from attnquant_gemma4.plugin import FULL, SLIDING

if TYPE_CHECKING:
    from attnquant_gemma4.model_config import AttnQuantGemma4Config

QKV = ("q_proj", "k_proj", "v_proj")
QK = ("q_proj", "k_proj")


class AttnQuantGemma4Attention(Gemma4Attention):
    """MAX's Gemma 4 attention with projections given."""

    def __init__(
        self,
        config: AttnQuantGemma4Config,
        projections: Mapping[str, Linear],
        layer: int,
        ropes: Mapping[str, RotaryEmbedding],
    ) -> None:
        """Build one layer's attention.

        Args:
            config: The model's.
            projections: `q_proj`, `k_proj`, `o_proj`, and `v_proj` if the layer has
                one.
            layer: Which layer of the decoder.
            ropes: The rotary table of each kind of layer.
        """
        kind = config.layer_types[layer]
        super().__init__(
            rope_global=ropes[FULL],
            rope_local=ropes[SLIDING],
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            num_global_key_value_heads=config.num_global_key_value_heads,
            attention_k_eq_v=config.attention_k_eq_v,
            hidden_size=config.hidden_size,
            kv_params=kv_params_for(config, kind),
            global_head_dim=config.global_head_dim,
            layer_idx=layer,
            layer_idx_in_cache=config.layer_types[:layer].count(kind),
            is_sliding=kind == SLIDING,
            dtype=config.dtype,
            devices=config.devices,
            qk_norm_eps=config.rms_norm_eps,
            local_window_size=config.sliding_window,
        )
        if config.has_v_proj(layer):
            self.qkv_proj = StackedProjection(QKV, [projections[name] for name in QKV])
        else:
            self.qk_proj = StackedProjection(QK, [projections[name] for name in QK])
        self.o_proj = projections["o_proj"]


def attention_factory(config: AttnQuantGemma4Config) -> AttentionFactory:
    """Return the attention layer factory of a model.

    Args:
        config: The model's. Rotary tables are built from it once, for all layers.
    """
    scaling = config.global_rope_scaling
    ropes: dict[str, RotaryEmbedding] = {
        SLIDING: Llama3RotaryEmbedding(
            dim=config.hidden_size,
            n_heads=config.num_attention_heads,
            theta=config.sliding_window_rope_theta,
            max_seq_len=config.max_seq_len,
            head_dim=config.head_dim,
            interleaved=False,
        ),
        FULL: ProportionalRotaryEmbedding(
            dim=config.hidden_size,
            n_heads=config.num_attention_heads,
            theta=config.global_rope_theta,
            max_seq_len=config.max_seq_len,
            head_dim=config.global_head_dim,
            interleaved=False,
            scaling_params=_partial(scaling),
        ),
    }

    def build(
        layer: int, projections: Mapping[str, Linear]
    ) -> AttnQuantGemma4Attention:
        return AttnQuantGemma4Attention(config, projections, layer, ropes)

    return build


def kv_params_for(config: AttnQuantGemma4Config, kind: str) -> KVCacheParams:
    """Return the cache parameters of one kind of layer."""
    assert isinstance(config.kv_params, MultiKVCacheParams)
    params = config.kv_params.children[kind]
    assert isinstance(params, KVCacheParams)
    return params


def _partial(
    scaling: ProportionalScalingParams | None,
) -> ProportionalScalingParams | None:
    # MAX passes on a factor that the config leaves out as None; it means all of it.
    if scaling is None or scaling.partial_rotary_factor is None:
        return None
    return scaling
