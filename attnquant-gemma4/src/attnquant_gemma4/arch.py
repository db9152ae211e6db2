"""Gemma 4's architectures as MAX registers them."""

from __future__ import annotations

import dataclasses

from max.graph.weights import WeightsFormat
from max.pipelines.architectures.gemma3.batch_processor import Gemma3BatchProcessor
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import PipelineTask

from attnquant.serving.encodings import with_flags
from attnquant_gemma4.model import AttnQuantGemma4Model
from attnquant_gemma4.model_config import AttnQuantGemma4Config
from attnquant_gemma4.plugin import ARCHITECTURE, UNIFIED_ARCHITECTURE
from attnquant_gemma4.tokenizer import AttnQuantGemma4Tokenizer
from attnquant_gemma4.weight_adapters import convert_safetensor_state_dict


class _BatchProcessor(Gemma3BatchProcessor):
    """MAX's, without the signal buffers that one device does not need."""

    _include_signal_buffers = False


gemma4_attnquant_arch = SupportedArchitecture(
    name=ARCHITECTURE,
    example_repo_ids=["google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"],
    default_encoding=AttnQuantGemma4Config.DEFAULT_ENCODING,
    supported_encodings=with_flags(AttnQuantGemma4Config.SUPPORTED_ENCODINGS),
    pipeline_model=AttnQuantGemma4Model,
    batching=_BatchProcessor,
    task=PipelineTask.TEXT_GENERATION,
    tokenizer=AttnQuantGemma4Tokenizer,
    context_type=TextContext,
    default_weights_format=WeightsFormat.safetensors,
    multi_gpu_supported=False,
    weight_adapters={WeightsFormat.safetensors: convert_safetensor_state_dict},
    config=AttnQuantGemma4Config,
    tool_parser="gemma4",
    reasoning_parser="gemma4",
    # One device allocates no signal buffers, so none are reserved for.
    memory_planner=PagedMemoryPlanner.with_activation_reservation(0),
    supports_overlap_scheduler=False,
    supports_device_graph_capture=False,
)

gemma4_unified_attnquant_arch = dataclasses.replace(
    gemma4_attnquant_arch,
    name=UNIFIED_ARCHITECTURE,
    example_repo_ids=["google/gemma-4-12B-it"],
)
