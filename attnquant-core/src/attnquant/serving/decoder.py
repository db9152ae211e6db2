"""The decoder around an architecture's layers: embedding, bases, norm, head, graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, Value, ops
from max.nn.embedding import Embedding
from max.nn.kv_cache import KVCacheParamInterface, PagedCacheValues
from max.nn.layer import LayerList, Module
from max.nn.linear import Linear
from max.nn.transformer.transformer import LogitsPostprocessMixin, ReturnLogits
from max.pipelines.lib.interfaces.batch_processor import ragged_batch_inputs

from attnquant.serving.formulations import (
    use_fused_formulation,
    use_precomputed_weff_outside,
)
from attnquant.serving.fused import FusedDense
from attnquant.serving.linear import set_w0
from attnquant.serving.w0 import W0
from attnquant.theta.layout import ThetaLayout


class DecoderConfig(Protocol):
    """What a model's config must have for the decoder."""

    vocab_size: int
    hidden_size: int
    dtype: DType
    devices: list[DeviceRef]
    final_logit_softcapping: float | None
    tie_word_embeddings: bool
    return_logits: ReturnLogits
    formulation: str

    @property
    def storage_dtype(self) -> DType:
        """The dtype of projections, embedding and head."""
        ...

    @property
    def kv_params(self) -> KVCacheParamInterface:
        """The layout of the cache."""
        ...

    @property
    def layer_types(self) -> Sequence[str]:
        """The kind of each layer, which is also the name of its cache."""
        ...

    @property
    def theta_layout(self) -> ThetaLayout:
        """The layout of the decomposition."""
        ...


class AttnQuantTextModel(LogitsPostprocessMixin, Module):
    """Embedding, layers, norm and head; the bases are declared here, once."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[Module],
        norm: Module,
        *,
        embed_scale: float = 1.0,
    ) -> None:
        """Put a decoder together.

        Args:
            config: The model's.
            layers: Decoder layers, called with hidden states ``[tokens, hidden]``,
                the cache of their kind and the row offsets.
            norm: The last norm.
            embed_scale: What embeddings are multiplied with.
        """
        super().__init__()
        device = config.devices[0]
        self.embed_scale = embed_scale
        storage = config.storage_dtype
        self.dtype = config.dtype
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, storage, device
        )
        self._lends_w0 = not use_precomputed_weff_outside(config.formulation)
        if self._lends_w0:
            self.W0 = W0(config.theta_layout, storage, device)
        self.layers = LayerList(layers)
        self.norm = norm
        head = (
            FusedHead if use_fused_formulation(config.formulation) else SoftCappedHead
        )
        self.lm_head = head(config)
        if config.tie_word_embeddings:
            self.lm_head.set_shared_weight("weight", self.embed_tokens.weight)
        self.layer_types = tuple(config.layer_types)
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
        x = self.embed(tokens)
        return self.decode(x, kv_collections, return_n_logits, input_row_offsets)

    def embed(self, tokens: TensorValue) -> TensorValue:
        """Return the scaled embeddings ``[tokens, hidden]`` of token ids."""
        return self.embed_tokens(tokens).cast(self.dtype) * self.embed_scale

    def decode(
        self,
        x: TensorValue,
        kv_collections: Mapping[str, PagedCacheValues],
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue,
    ) -> tuple[TensorValue, ...]:
        """Return logits of embeddings ``[tokens, hidden]``; for the rest, as above."""
        for layer, kind in zip(self.layers, self.layer_types, strict=True):
            if self._lends_w0:
                set_w0(layer, self.W0)
            x = layer(x, kv_collections[kind], input_row_offsets)
        return self._postprocess_logits(x, input_row_offsets, return_n_logits)


class SoftCappedHead(Linear):
    """The output head; logits are ``cap·tanh(x/cap)`` where the config says so."""

    def __init__(self, config: DecoderConfig) -> None:
        """Declare the weight ``[vocabulary, hidden]``; it may be shared later."""
        super().__init__(
            config.hidden_size,
            config.vocab_size,
            config.storage_dtype,
            config.devices[0],
        )
        self.cap = config.final_logit_softcapping

    def __call__(self, x: TensorValue) -> TensorValue:
        """Return logits ``[..., vocabulary]``."""
        logits = super().__call__(x)
        return ops.tanh(logits / self.cap) * self.cap if self.cap else logits


class FusedHead(SoftCappedHead, FusedDense):
    """The output head under `fused`: the op without a low-rank term."""


class AttnQuantDecoder(Module):
    """The graph: MAX's flat inputs around a text model, on one device."""

    def __init__(self, config: DecoderConfig, text_model: AttnQuantTextModel) -> None:
        """Hold the text model under the name that weights have in MAX's Gemma."""
        super().__init__()
        self.language_model = text_model
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
        return self.language_model(
            tokens.tensor,
            self.caches(kv_inputs),
            return_n_logits.tensor,
            input_row_offsets.tensor,
        )

    def caches(self, kv_inputs: Iterable[Value[Any]]) -> dict[str, PagedCacheValues]:
        """Return the cache of each kind of layer, out of the graph's flat inputs."""
        caches: Any = self.kv_params.unflatten_kv_inputs(iter(kv_inputs))
        kinds = set(self.language_model.layer_types)
        # On the one device: one cache for each kind of layer, or one for all.
        if isinstance(caches, Mapping):
            return {kind: caches[kind][0] for kind in kinds}
        return dict.fromkeys(kinds, caches[0])
