"""Gemma 3's decoder layer on one device: four norms around attention and MLP."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import Module
from max.pipelines.architectures.gemma3.layers.rms_norm import Gemma3RMSNorm

from attnquant.serving.mlp import AttnQuantMLP


class AttnQuantGemma3Block(Module):
    """Norm, attention, norm, residual; norm, MLP, norm, residual."""

    def __init__(
        self,
        attention: Module,
        mlp: AttnQuantMLP,
        *,
        hidden_size: int,
        eps: float,
        dtype: DType,
    ) -> None:
        """Hold attention and MLP, and declare the norms (``[hidden_size]`` each)."""
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = Gemma3RMSNorm(hidden_size, dtype, eps)
        self.post_attention_layernorm = Gemma3RMSNorm(hidden_size, dtype, eps)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(hidden_size, dtype, eps)
        self.post_feedforward_layernorm = Gemma3RMSNorm(hidden_size, dtype, eps)

    def __call__(
        self,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Apply the layer to ragged hidden states ``[tokens, hidden]``."""
        attended = self.self_attn(
            self.input_layernorm(x),
            kv_collection,
            input_row_offsets=input_row_offsets,
        )
        x = x + self.post_attention_layernorm(attended)
        expanded = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(expanded)
