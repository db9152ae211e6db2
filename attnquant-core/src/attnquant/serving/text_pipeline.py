"""A pipeline model of text on one device, for packages that need none of MAX's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from max import tree
from max.driver import Buffer
from max.engine import InferenceSession, Model
from max.nn.kv_cache import KVCacheInputs
from max.pipelines.context import TextContext
from max.pipelines.lib import ModelInputs, ModelOutputs, PipelineModelWithKVCache
from max.pipelines.lib.graph_specs import GraphRole
from max.pipelines.lib.interfaces.batch_processor import (
    SingleReplicaRaggedBatchProcessor,
)
from max.pipelines.lib.log_probabilities import LogProbabilitiesMixin

from attnquant.serving.pipeline_model import AttnQuantPipelineModelMixin


@dataclass
class TextInputs(ModelInputs):
    """What `AttnQuantDecoder.input_tree` asks for, the cache aside.

    Attributes:
        tokens: Ragged token ids ``[tokens]``.
        return_n_logits: How many logits a sequence gets.
        input_row_offsets: Where each sequence begins, ``[batch + 1]``.
    """

    tokens: Buffer
    return_n_logits: Buffer
    input_row_offsets: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The graph's inputs, in its order."""
        cache = self.kv_cache_inputs
        leaves: tuple[Buffer, ...] = tuple(tree.leaves(cache)) if cache else ()
        return (self.tokens, self.return_n_logits, self.input_row_offsets, *leaves)


class TextBatchProcessor(SingleReplicaRaggedBatchProcessor[TextContext, TextInputs]):
    """Batches of text for one device, which needs no signal buffers."""

    def _make_inputs(
        self,
        *,
        tokens: Buffer,
        input_row_offsets: Buffer,
        return_n_logits: Buffer,
        kv_cache_inputs: KVCacheInputs[Buffer, Buffer] | None,
        signal_buffers: list[Buffer],
    ) -> TextInputs:
        del signal_buffers
        return TextInputs(
            tokens=tokens,
            return_n_logits=return_n_logits,
            input_row_offsets=input_row_offsets,
            kv_cache_inputs=kv_cache_inputs,
        )


class AttnQuantTextPipelineModel(
    AttnQuantPipelineModelMixin,
    LogProbabilitiesMixin,
    PipelineModelWithKVCache[TextContext, Any, Model],
):
    """Loads, compiles and runs one decoder of text.

    A model package sets `model_config_cls` and `weight_adapter`, and writes
    `build_decoder`.
    """

    model_config_cls: ClassVar[type[Any]]
    batch_processor_cls: ClassVar[type[TextBatchProcessor]] = TextBatchProcessor

    def __init__(
        self, pipeline_config: Any, session: InferenceSession, *args: Any, **kwargs: Any
    ) -> None:
        """Load and compile the decoder; arguments are MAX's and handed through."""
        super().__init__(pipeline_config, session, *args, **kwargs)
        self._models = self.load_graphs(session)

    @property
    def model(self) -> Model:
        """The compiled decoder."""
        return self._models[GraphRole.DECODER]

    def _hf_config_for_weights(self) -> Any:
        return self.huggingface_config

    def _create_model_config(self, state_dict: dict[str, Any]) -> Any:
        config = self.model_config_cls.initialize_from_config(
            self.pipeline_config, self.huggingface_config, max_seq_len=self.max_seq_len
        )
        config.finalize(
            huggingface_config=self.huggingface_config,
            state_dict=state_dict,
            return_logits=self.return_logits,
        )
        self.finish_config(config)
        return config

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Run the decoder once."""
        assert isinstance(model_inputs, TextInputs)
        outputs = self.model.execute(*model_inputs.buffers)
        assert self.batch_processor is not None
        return self.batch_processor.process_outputs(outputs)
