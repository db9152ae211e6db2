"""Gemma 4's mixture of experts, dense and untouched, on any single device."""

from __future__ import annotations

from typing import Any

from max.driver import accelerator_architecture_name
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.activation import GatedActivation
from max.nn.layer import Module
from max.nn.moe import MoE
from max.pipelines.architectures.gemma4.layers.moe import Gemma4MoEGate
from max.pipelines.architectures.gemma4.layers.rms_norm import Gemma4RMSNorm

HOPPER = "sm_90"


class StackedExperts(Module):
    """All experts' matrices, stacked as the checkpoint has them."""

    def __init__(
        self, experts: int, hidden: int, wide: int, dtype: DType, device: DeviceRef
    ) -> None:
        """Declare `gate_up_proj [E, 2·wide, hidden]`, `down_proj [E, hidden, wide]`."""
        super().__init__()
        self.gate_up_proj = Weight(
            "gate_up_proj", dtype, (experts, 2 * wide, hidden), device
        )
        self.down_proj = Weight("down_proj", dtype, (experts, hidden, wide), device)

    def __call__(self) -> None:
        """Refuse: MAX's modules are callable, but this one only holds weights."""
        raise TypeError


class AttnQuantGemma4Experts(MoE):
    """MAX's mixture of experts over stacked weights, with a way round grouped matmul.

    MAX 26.7's grouped matmul has no CPU kernel, and its kernel for Hopper GPUs does not
    compile. There every expert computes every token, and what the router did not choose
    is multiplied by zero: right, and slow.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        eps: float,
        dtype: DType,
        device: DeviceRef,
    ) -> None:
        """Declare router, norm and experts.

        Args:
            num_experts: How many experts there are.
            top_k: How many of them a token uses.
            hidden_size: Width of the stream.
            intermediate_size: Width inside an expert.
            eps: Of the norms.
            dtype: Of weights and activations.
            device: Where the weights live.
        """

        def gate(**arguments: Any) -> Gemma4MoEGate:
            # MAX has it in bfloat16 whatever the config says.
            return Gemma4MoEGate(**{**arguments, "dtype": dtype}, eps=eps)

        super().__init__(
            devices=[device],
            hidden_dim=hidden_size,
            num_experts=num_experts,
            num_experts_per_token=top_k,
            moe_dim=intermediate_size,
            gate_cls=gate,
            activation=GatedActivation("gelu_tanh"),
            pre_expert_norm_cls=lambda: Gemma4RMSNorm(hidden_size, dtype, eps),
            dtype=dtype,
        )

    def _init_experts(self) -> None:
        self.experts: Any = StackedExperts(
            self.num_experts, self.hidden_dim, self.moe_dim, self.dtype, self.devices[0]
        )

    @property
    def gate_up_proj(self) -> TensorValue:
        """The experts' gates and ups ``[E, 2·wide, hidden]``."""
        return TensorValue(self.experts.gate_up_proj)

    @property
    def down_proj(self) -> TensorValue:
        """The experts' downs ``[E, hidden, wide]``."""
        return TensorValue(self.experts.down_proj)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Apply router, norm and experts to ``x [tokens, hidden]``."""
        if has_grouped_matmul(self.devices[0]):
            return super().__call__(x)
        assert self.pre_expert_norm is not None
        chosen, weights = self.gate(x)
        x = self.pre_expert_norm(x)
        experts = ops.range(
            0, self.num_experts, dtype=chosen.dtype, device=chosen.device
        )
        hits = ops.cast(ops.equal(ops.unsqueeze(chosen, -1), experts), x.dtype)
        # [tokens, k, E] summed over k -> [E, tokens, 1]
        share = ops.sum(hits * ops.unsqueeze(weights, -1), axis=1)
        share = ops.permute(share, [2, 0, 1])
        stacked = ops.broadcast_to(
            ops.unsqueeze(x, 0), (self.num_experts, x.shape[0], self.hidden_dim)
        )
        gate_up = stacked @ ops.transpose(self.gate_up_proj, 1, 2)
        gate, up = ops.chunk(gate_up, 2, axis=-1)
        inner = ops.gelu(gate, approximate="tanh") * up
        out = (inner @ ops.transpose(self.down_proj, 1, 2)) * share
        # Over many experts, wider than bfloat16.
        total = ops.sum(ops.cast(out, DType.float32), axis=0)
        return ops.cast(ops.squeeze(total, 0), x.dtype)


def has_grouped_matmul(device: DeviceRef) -> bool:
    """Return whether MAX's grouped matmul compiles for a device.

    Args:
        device: Where the experts are; of GPUs, MAX knows one kind at a time.
    """
    if device.is_cpu():
        return False
    return not accelerator_architecture_name().startswith(HOPPER)
