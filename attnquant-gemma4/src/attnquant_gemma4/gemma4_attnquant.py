"""Gemma 4's decoder with shared bases, on one device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from max.dtype import DType
from max.graph import TensorType, TensorValue, Value, ops
from max.nn.embedding import Embedding
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import LayerList, Module
from max.nn.linear import Linear
from max.nn.transformer.transformer import LogitsPostprocessMixin
from max.pipelines.architectures.gemma4.layers.rms_norm import Gemma4RMSNorm
from max.pipelines.lib.interfaces.batch_processor import ragged_batch_inputs

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.linear import set_w0
from attnquant.serving.mlp import AttnQuantMLP
from attnquant.serving.projections import ProjectionMaker
from attnquant.serving.w0 import W0
from attnquant.theta.families import ATTN_FAMILIES, MLP_FAMILIES
from attnquant_gemma4.layers.attention import attention_factory
from attnquant_gemma4.layers.experts import AttnQuantGemma4Experts
from attnquant_gemma4.layers.transformer_block import AttnQuantGemma4Block
from attnquant_gemma4.model_config import AttnQuantGemma4Config
from attnquant_gemma4.plugin import FULL, SLIDING


class AttnQuantGemma4TextModel(LogitsPostprocessMixin, Module):
    """Embedding, layers, norm and head; the bases are declared here, once."""

    def __init__(self, config: AttnQuantGemma4Config) -> None:
        """Declare everything a config and its layout ask for."""
        super().__init__()
        device = config.devices[0]
        self.embed_scale = config.hidden_size**0.5
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, config.dtype, device
        )
        if config.formulation != "dense":
            self.W0 = W0(config.theta_layout, config.dtype, device)
        self.layers = LayerList(_layers(config))
        self.norm = Gemma4RMSNorm(config.hidden_size, config.dtype, config.rms_norm_eps)
        self.lm_head = SoftCappedHead(config)
        if config.tie_word_embeddings:
            self.lm_head.set_shared_weight("weight", self.embed_tokens.weight)
        self.layer_types = config.layer_types
        self.return_logits = config.return_logits

    def __call__(
        self,
        tokens: TensorValue,
        kv_collections: Mapping[str, PagedCacheValues],
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue,
    ) -> tuple[TensorValue, ...]:
        """Return logits, as `LogitsPostprocessMixin` orders them.

        Args:
            tokens: Ragged token ids ``[tokens]``.
            kv_collections: The cache of each kind of layer.
            return_n_logits: How many logits a sequence gets.
            input_row_offsets: Where each sequence begins, ``[batch + 1]``.
        """
        x = self.embed_tokens(tokens) * self.embed_scale
        for layer, kind in zip(self.layers, self.layer_types, strict=True):
            if hasattr(self, "W0"):
                set_w0(layer, self.W0)
            x = layer(x, kv_collections[kind], input_row_offsets)
        return self._postprocess_logits(x, input_row_offsets, return_n_logits)


class SoftCappedHead(Linear):
    """The output head; logits are ``cap·tanh(x/cap)`` where the config says so."""

    def __init__(self, config: AttnQuantGemma4Config) -> None:
        """Declare the weight ``[vocabulary, hidden]``; it may be shared later."""
        super().__init__(
            config.hidden_size, config.vocab_size, config.dtype, config.devices[0]
        )
        self.cap = config.final_logit_softcapping

    def __call__(self, x: TensorValue) -> TensorValue:
        """Return logits ``[..., vocabulary]``."""
        logits = super().__call__(x)
        return ops.tanh(logits / self.cap) * self.cap if self.cap else logits


class AttnQuantGemma4(Module):
    """The graph: MAX's flat inputs around the text model."""

    def __init__(self, config: AttnQuantGemma4Config) -> None:
        """Build the text model under the name that weights have in MAX's Gemma."""
        super().__init__()
        self.language_model = AttnQuantGemma4TextModel(config)
        self.device = config.devices[0]
        self.kv_params = config.kv_params

    def input_tree(self) -> OrderedDict[str, object]:
        """Name the graph's inputs, in order; the leaves are its input types."""
        return OrderedDict(
            batch=ragged_batch_inputs(self.device, ("tokens", "return_n_logits")),
            row_offsets=(
                TensorType(
                    DType.uint32, shape=["input_row_offsets_len"], device=self.device
                ),
            ),
            kv=self.kv_params.get_symbolic_inputs(),
        )

    def __call__(
        self,
        tokens: Value[Any],
        return_n_logits: Value[Any],
        input_row_offsets: Value[Any],
        *kv_inputs: Value[Any],
    ) -> tuple[TensorValue, ...]:
        """Take the inputs of `input_tree`; return logits."""
        sliding, full = self.kv_params.unflatten_basic_kv_tree(iter(kv_inputs))
        return self.language_model(
            tokens.tensor,
            {SLIDING: sliding[0], FULL: full[0]},
            return_n_logits.tensor,
            input_row_offsets.tensor,
        )


def _layers(config: AttnQuantGemma4Config) -> list[AttnQuantGemma4Block]:
    maker = ProjectionMaker(
        config.theta_layout, config.formulation, config.dtype, config.devices[0]
    )
    build_attention = attention_factory(config)
    return [
        _layer(config, layer, maker, build_attention)
        for layer in range(config.num_hidden_layers)
    ]


def _layer(
    config: AttnQuantGemma4Config,
    layer: int,
    maker: ProjectionMaker,
    build_attention: AttentionFactory,
) -> AttnQuantGemma4Block:
    dims = config.projection_dims(layer)
    attention_dims = {name: dims[name] for name in ATTN_FAMILIES if name in dims}
    mlp_dims = {name: dims[name] for name in MLP_FAMILIES}
    return AttnQuantGemma4Block(
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
