"""Gemma 4's decoder with shared bases, on one device."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from max.graph import TensorValue, Value
from max.nn.layer import Module
from max.pipelines.architectures.gemma4.layers.rms_norm import Gemma4RMSNorm
from max.pipelines.lib.interfaces.batch_processor import vision_merge_inputs
from max.pipelines.lib.vlm_utils import merge_multimodal_embeddings

from attnquant.hookspecs import AttentionFactory
from attnquant.serving.decoder import AttnQuantDecoder, AttnQuantTextModel
from attnquant.serving.mlp import AttnQuantMLP
from attnquant.theta.families import ATTN_FAMILIES, MLP_FAMILIES
from attnquant_gemma4.layers.experts import AttnQuantGemma4Experts
from attnquant_gemma4.layers.transformer_block import AttnQuantGemma4Block
from attnquant_gemma4.model_config import AttnQuantGemma4Config


class AttnQuantGemma4(AttnQuantDecoder):
    """Scaled embeddings, Gemma 4's layers, and a norm of its kind.

    As in MAX's, embeddings of images are inputs always: a batch of text has none. So
    there is one graph whether images are served or not.
    """

    def __init__(
        self, config: AttnQuantGemma4Config, build_attention: AttentionFactory
    ) -> None:
        """Declare everything a config and its layout ask for."""
        text_model = AttnQuantTextModel(
            config,
            _layers(config, build_attention),
            Gemma4RMSNorm(config.hidden_size, config.dtype, config.rms_norm_eps),
            embed_scale=config.hidden_size**0.5,
        )
        super().__init__(config, text_model)
        self.image_rows = vision_merge_inputs(
            config.devices,
            config.dtype,
            config.hidden_size,
            rows_dim="num_image_tokens",
        )

    def input_tree(self) -> OrderedDict[str, object]:
        """Name the graph's inputs, in the order of MAX's batches for Gemma 4."""
        inputs = super().input_tree()
        inputs["vision"] = self.image_rows
        inputs.move_to_end("kv")
        return inputs

    def __call__(  # type: ignore[override]
        self,
        tokens: Value[Any],
        return_n_logits: Value[Any],
        input_row_offsets: Value[Any],
        image_embeddings: Value[Any],
        image_token_indices: Value[Any],
        *kv_inputs: Value[Any],
    ) -> tuple[TensorValue, ...]:
        """Take the inputs of `input_tree`; return logits.

        Args:
            tokens: Ragged token ids ``[tokens]``.
            return_n_logits: How many logits a sequence gets.
            input_row_offsets: Where each sequence begins, ``[batch + 1]``.
            image_embeddings: What takes the place of placeholders' embeddings,
                ``[rows, hidden]``.
            image_token_indices: Which positions of ``tokens`` those are, ``[rows]``.
            kv_inputs: The caches.
        """
        x = merge_multimodal_embeddings(
            self.language_model.embed(tokens.tensor),
            image_embeddings.tensor,
            image_token_indices.tensor,
        )
        return self.language_model.decode(
            x,
            self.caches(kv_inputs),
            return_n_logits.tensor,
            input_row_offsets.tensor,
        )


def _layers(
    config: AttnQuantGemma4Config, build_attention: AttentionFactory
) -> list[Module]:
    maker = config.projection_maker()
    layers: list[Module] = []
    for layer in range(config.num_hidden_layers):
        dims = config.projection_dims(layer)
        attention_dims = {name: dims[name] for name in ATTN_FAMILIES if name in dims}
        mlp_dims = {name: dims[name] for name in MLP_FAMILIES}
        block = AttnQuantGemma4Block(
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
        layers.append(block)
    return layers


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
