"""Gemma 4's pipeline model."""

from __future__ import annotations

import dataclasses
import logging
from functools import cached_property
from typing import Any, ClassVar

from max.driver import Buffer
from max.graph.weights import WeightData
from max.pipelines.architectures.gemma4.batch_vision_inputs import create_empty_indices
from max.pipelines.architectures.gemma4.model import Gemma3_MultiModalModel
from max.pipelines.lib import ModelInputs
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.lib.log_probabilities import LogProbabilitiesMixin

from attnquant.errors import CheckpointError
from attnquant.hookspecs import AttentionFactory
from attnquant.serving.pipeline_model import AttnQuantPipelineModelMixin
from attnquant.serving.weight_adapter import WeightAdapter
from attnquant_gemma4.gemma4_attnquant import AttnQuantGemma4
from attnquant_gemma4.model_config import (
    AttnQuantGemma4Config,
    decoder_config,
    serves_images,
)
from attnquant_gemma4.weight_adapters import (
    convert_safetensor_state_dict,
    vision_weights,
)

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


class AttnQuantGemma4Model(
    AttnQuantPipelineModelMixin, LogProbabilitiesMixin, Gemma3_MultiModalModel
):
    """MAX's multimodal pipeline model around the AttnQuant decoder.

    Its vision graph is used as it is, where there is one to use; the batches, the
    cache of encoded images and where their embeddings go are MAX's in any case.
    """

    model_config_cls: ClassVar[type[Any]] = AttnQuantGemma4Config
    weight_adapter: ClassVar[WeightAdapter] = convert_safetensor_state_dict

    _vision_weights_dict: dict[str, WeightData]

    def build_decoder(
        self, model_config: AttnQuantGemma4Config, build_attention: AttentionFactory
    ) -> AttnQuantGemma4:
        """Build the decoder's module."""
        return AttnQuantGemma4(model_config, build_attention)

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Return the decoder's graph, and beside it MAX's vision graph if served."""
        specs = super().graph_specs(model_config)
        if self._include_vision_graph(model_config):
            vision = self._vision_spec(model_config, self._vision_weights_dict)
            decoder = specs[GraphRole.DECODER]
            specs[GraphRole.DECODER] = dataclasses.replace(decoder, group=vision.group)
            specs[GraphRole.VISION] = vision
            logger.info("AttnQuant: images are served, with MAX's own vision graph")
        return specs

    def prepare_initial_token_inputs(self, *args: Any, **options: Any) -> ModelInputs:
        """Prepare a batch, as one without images.

        MAX's pipelines then put embeddings of images in, if there are any; whoever
        runs this model without them has inputs for the whole graph.
        """
        inputs = super().prepare_initial_token_inputs(*args, **options)
        inputs.vision_embeddings = self.empty_vision_embeddings(self.devices)
        inputs.vision_scatter_indices = self._no_indices
        return inputs

    @cached_property
    def _no_indices(self) -> list[Buffer]:
        return create_empty_indices(self.devices)

    def _hf_config_for_weights(self) -> Any:
        return decoder_config(self.huggingface_config)

    def _load_state_dict(self) -> dict[str, Any]:
        self._vision_weights_dict = (
            vision_weights(self.weights, self.dtype)
            if serves_images(self.huggingface_config, self.pipeline_config.model)
            else {}
        )
        return super()._load_state_dict()

    def _create_model_config(self, state_dict: dict[str, Any]) -> Any:
        config: Any = AttnQuantGemma4Config.initialize(
            self.pipeline_config, max_seq_len=self.max_seq_len
        )
        config.finalize(
            huggingface_config=self._hf_config_for_weights(),
            state_dict=state_dict,
            return_logits=self.return_logits,
        )
        self.finish_config(config)
        self.config = config
        return config

    def _vision_spec(self, config: Any, state_dict: dict[str, WeightData]) -> GraphSpec:
        try:
            return super()._vision_spec(config, state_dict)
        except ValueError as error:
            raise CheckpointError(
                "the vision tower",
                expected="the tensors that vision_config of config.json asks for",
                found=str(error),
                hint="Without a tower, set vision_config to null: text is served.",
            ) from error
