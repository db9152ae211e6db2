"""Gemma 4's architectures as MAX registers them."""

from __future__ import annotations

import dataclasses
from typing import Any

from max.graph.weights import WeightsFormat
from max.pipelines.architectures.gemma4.batch_processor import Gemma4BatchProcessor
from max.pipelines.architectures.gemma4.context import Gemma4Context
from max.pipelines.architectures.gemma4.memory_planner import Gemma4MemoryPlanner
from max.pipelines.lib import PipelineConfig, SupportedArchitecture
from max.pipelines.modeling.types import InputModality, PipelineTask

from attnquant.serving.encodings import with_flags
from attnquant_gemma4.model import AttnQuantGemma4Model
from attnquant_gemma4.model_config import AttnQuantGemma4Config, serves_images
from attnquant_gemma4.plugin import ARCHITECTURE, UNIFIED_ARCHITECTURE
from attnquant_gemma4.tokenizer import AttnQuantGemma4Tokenizer
from attnquant_gemma4.weight_adapters import convert_safetensor_state_dict


class _MemoryPlanner(Gemma4MemoryPlanner):
    """MAX's, which reserves for what is there: signals never, images where served."""

    _always_signal_buffers = False

    def estimate_activation_memory(
        self, pipeline_config: PipelineConfig, huggingface_config: Any
    ) -> int:
        """Return the bytes that encoding images may take beside weights and caches."""
        if not serves_images(huggingface_config, pipeline_config.model):
            return 0
        return super().estimate_activation_memory(pipeline_config, huggingface_config)


gemma4_attnquant_arch = SupportedArchitecture(
    name=ARCHITECTURE,
    example_repo_ids=["google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"],
    default_encoding=AttnQuantGemma4Config.DEFAULT_ENCODING,
    supported_encodings=with_flags(AttnQuantGemma4Config.SUPPORTED_ENCODINGS),
    pipeline_model=AttnQuantGemma4Model,
    batching=Gemma4BatchProcessor,
    task=PipelineTask.TEXT_GENERATION,
    tokenizer=AttnQuantGemma4Tokenizer,
    context_type=Gemma4Context,
    input_modalities={InputModality.TEXT, InputModality.IMAGE, InputModality.VIDEO},
    default_weights_format=WeightsFormat.safetensors,
    multi_gpu_supported=False,
    weight_adapters={WeightsFormat.safetensors: convert_safetensor_state_dict},
    config=AttnQuantGemma4Config,
    tool_parser="gemma4",
    reasoning_parser="gemma4",
    memory_planner=_MemoryPlanner,
    supports_overlap_scheduler=False,
    supports_device_graph_capture=False,
)

gemma4_unified_attnquant_arch = dataclasses.replace(
    gemma4_attnquant_arch,
    name=UNIFIED_ARCHITECTURE,
    example_repo_ids=["google/gemma-4-12B-it"],
    # Its images go through an embedder that MAX does not have.
    input_modalities={InputModality.TEXT},
)
