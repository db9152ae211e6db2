"""`LlamaForCausalLM` as MAX registers it."""

from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import PipelineTask

from attnquant.serving.api import (
    CheckedTextTokenizer,
    TextBatchProcessor,
    with_flags,
)
from attnquant_llama.model import AttnQuantLlamaModel
from attnquant_llama.model_config import AttnQuantLlamaConfig
from attnquant_llama.plugin import ARCHITECTURE
from attnquant_llama.weight_adapters import convert_safetensor_state_dict

llama_attnquant_arch = SupportedArchitecture(
    name=ARCHITECTURE,
    example_repo_ids=["HuggingFaceTB/SmolLM2-135M-Instruct"],
    default_encoding=AttnQuantLlamaConfig.DEFAULT_ENCODING,
    supported_encodings=with_flags(AttnQuantLlamaConfig.SUPPORTED_ENCODINGS),
    pipeline_model=AttnQuantLlamaModel,
    batching=TextBatchProcessor,
    task=PipelineTask.TEXT_GENERATION,
    tokenizer=CheckedTextTokenizer,
    context_type=TextContext,
    default_weights_format=WeightsFormat.safetensors,
    multi_gpu_supported=False,
    weight_adapters={WeightsFormat.safetensors: convert_safetensor_state_dict},
    config=AttnQuantLlamaConfig,
    memory_planner=PagedMemoryPlanner.with_activation_reservation(0),
    supports_overlap_scheduler=False,
    supports_device_graph_capture=False,
)
