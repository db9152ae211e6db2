"""`AttnQuantMLP`: MAX's gated MLP around given projections."""

from __future__ import annotations

from collections.abc import Mapping

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, TensorValueLike, ops
from max.nn.linear import MLP, Linear

from attnquant.serving.fused import fused, is_fused
from attnquant.serving.linear import AttnQuantLinear


class AttnQuantMLP(MLP):
    """``down(act(gate(x)) * up(x))``, with the activation that the config names."""

    def __init__(
        self,
        projections: Mapping[str, Linear],
        *,
        hidden_activation: str,
        dtype: DType,
        hidden_dim: int,
        feed_forward_length: int,
        device: DeviceRef,
    ) -> None:
        """Hold the projections.

        Args:
            projections: `gate_proj`, `up_proj` and `down_proj`.
            hidden_activation: MAX's name of it, such as ``gelu_tanh``.
            dtype: Dtype of weights and activations.
            hidden_dim: Width of input and output.
            feed_forward_length: Width between.
            device: Where the weights live.
        """
        super().__init__(
            dtype=dtype,
            quantization_encoding=None,
            hidden_dim=hidden_dim,
            feed_forward_length=feed_forward_length,
            devices=[device],
            activation_function=hidden_activation,
            # Without children of its own: they are given.
            is_sharding=True,
        )
        self.gate_proj = projections["gate_proj"]
        self.up_proj = projections["up_proj"]
        self.down_proj = projections["down_proj"]

    def __call__(self, x: TensorValueLike) -> TensorValue:
        """Apply the MLP to ``x [..., hidden]``."""
        pair = (self.gate_proj, self.up_proj)
        if not is_fused(pair):
            return super().__call__(x)
        y = fused(TensorValue(x), pair)
        width = self.feed_forward_length
        gate, up = ops.split(y, [width, width], axis=-1)
        return self.down_proj(self.activation_function(gate) * up)

    def _can_used_fused_mlp(self) -> bool:
        # MAX fuses gate and up by concatenating their weights.
        return super()._can_used_fused_mlp() and not any(
            isinstance(linear, AttnQuantLinear)
            for linear in (self.gate_proj, self.up_proj)
        )
