"""Gemma 4's decoder layer on one device: norms around attention, MLP and experts."""

from __future__ import annotations

from functools import partial

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import Module
from max.pipelines.architectures.gemma4.layers.rms_norm import Gemma4RMSNorm

from attnquant.serving.mlp import AttnQuantMLP
from attnquant_gemma4.layers.experts import AttnQuantGemma4Experts


class AttnQuantGemma4Block(Module):
    """Norm, attention, norm, residual; norm, MLP, norm, residual; times a scalar.

    With experts, their output is added to the MLP's, each normed by itself.
    """

    def __init__(
        self,
        attention: Module,
        mlp: AttnQuantMLP,
        experts: AttnQuantGemma4Experts | None,
        *,
        hidden_size: int,
        eps: float,
        dtype: DType,
    ) -> None:
        """Hold the parts, and declare norms ``[hidden_size]`` and the scalar ``[1]``.

        Args:
            attention: The attention layer.
            mlp: The dense MLP.
            experts: The mixture of experts beside it, or None.
            hidden_size: Width of the stream.
            eps: Of the norms.
            dtype: Of weights and activations.
        """
        super().__init__()
        norm = partial(Gemma4RMSNorm, hidden_size, dtype, eps)
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        self.has_experts = experts is not None
        if experts is not None:
            # Under MAX's name of it.
            self.moe_block = experts
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
        self.layer_scalar = Weight("layer_scalar", dtype, [1], DeviceRef.CPU())

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
        if self.has_experts:
            # Router and experts see the stream, not the MLP's normed input.
            routed = self.post_feedforward_layernorm_2(self.moe_block(x))
            expanded = self.post_feedforward_layernorm_1(expanded) + routed
        x = x + self.post_feedforward_layernorm(expanded)
        return x * self.layer_scalar.to(x.device)
