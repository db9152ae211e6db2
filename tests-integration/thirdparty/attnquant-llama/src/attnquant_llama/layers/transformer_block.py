"""Llama's decoder layer on one device: a norm before attention and one before MLP."""

from __future__ import annotations

from max.graph import TensorValue
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import Module
from max.nn.norm import RMSNorm

from attnquant.serving.api import AttnQuantMLP
from attnquant_llama.model_config import AttnQuantLlamaConfig


class AttnQuantLlamaBlock(Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(
        self, attention: Module, mlp: AttnQuantMLP, config: AttnQuantLlamaConfig
    ) -> None:
        """Hold attention and MLP, and declare the norms (``[hidden_size]`` each)."""
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = make_norm(config)
        self.post_attention_layernorm = make_norm(config)

    def __call__(
        self,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Apply the layer to ragged hidden states ``[tokens, hidden]``."""
        x = x + self.self_attn(
            self.input_layernorm(x), kv_collection, input_row_offsets
        )
        return x + self.mlp(self.post_attention_layernorm(x))


def make_norm(config: AttnQuantLlamaConfig) -> RMSNorm:
    """Declare a norm over hidden states; its weights are gains."""
    assert config.rms_norm_eps is not None
    return RMSNorm(
        config.hidden_size,
        config.dtype,
        config.rms_norm_eps,
        multiply_before_cast=False,
    )
