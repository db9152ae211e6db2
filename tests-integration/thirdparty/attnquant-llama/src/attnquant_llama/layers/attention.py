"""Llama's attention around given projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.attention import AttentionWithRope
from max.nn.kv_cache import PagedCacheValues
from max.nn.linear import Linear
from max.nn.rotary_embedding import Llama3RotaryEmbedding

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.api import StackedProjection

if TYPE_CHECKING:
    from attnquant_llama.model_config import AttnQuantLlamaConfig

QKV = ("q_proj", "k_proj", "v_proj")


class AttnQuantLlamaAttention(AttentionWithRope):
    """MAX's attention with rotary embeddings, with projections given."""

    def __init__(
        self,
        config: AttnQuantLlamaConfig,
        projections: Mapping[str, Linear],
        layer: int,
        rope: Llama3RotaryEmbedding,
    ) -> None:
        """Build one layer's attention.

        Args:
            config: The model's.
            projections: `q_proj`, `k_proj`, `v_proj` and `o_proj`.
            layer: Which layer of the cache.
            rope: The rotary table of all layers.
        """
        super().__init__(
            rope=rope,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            hidden_size=config.hidden_size,
            kv_params=config.kv_params,
            devices=config.devices,
            dtype=config.dtype,
            scale=config.attention_multiplier,
        )
        self.layer = layer
        self.qkv_proj = StackedProjection(QKV, [projections[name] for name in QKV])
        self.o_proj = projections["o_proj"]

    def __call__(  # type: ignore[override]
        self,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Attend from ragged hidden states ``[tokens, hidden]`` to what came before."""
        layer = ops.constant(self.layer, DType.uint32, device=DeviceRef.CPU())
        return super().__call__(
            layer, x, kv_collection, self.rope.freqs_cis, input_row_offsets
        )


def attention_factory(config: AttnQuantLlamaConfig) -> AttentionFactory:
    """Return the attention layer factory of a model.

    Args:
        config: The model's. The rotary table is built from it once, for all layers.
    """
    rope = Llama3RotaryEmbedding(
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        theta=config.rope_theta,
        max_seq_len=config.max_seq_len,
        head_dim=config.kv_params.head_dim,
        interleaved=False,
        scaling_params=config.rope_scaling_params,
    )

    def build(layer: int, projections: Mapping[str, Linear]) -> AttnQuantLlamaAttention:
        return AttnQuantLlamaAttention(config, projections, layer, rope)

    return build
