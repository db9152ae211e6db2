"""`Gemma3ForCausalLM` as MAX registers it."""

from __future__ import annotations

from max.graph.weights import WeightsFormat
from max.pipelines.architectures.gemma3.batch_processor import Gemma3BatchProcessor
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import PipelineTask

from attnquant.serving.api import CheckedTextTokenizer, with_flags
from attnquant_gemma3.model import AttnQuantGemma3Model
from attnquant_gemma3.model_config import AttnQuantGemma3Config
from attnquant_gemma3.plugin import ARCHITECTURE
from attnquant_gemma3.weight_adapters import convert_safetensor_state_dict


class _BatchProcessor(Gemma3BatchProcessor):
    """MAX's, without the signal buffers that one device does not need."""

    _include_signal_buffers = False


gemma3_attnquant_arch = SupportedArchitecture(
    name=ARCHITECTURE,
    example_repo_ids=["google/gemma-3-270m", "google/gemma-3-1b-it"],
    default_encoding=AttnQuantGemma3Config.DEFAULT_ENCODING,
    supported_encodings=with_flags(AttnQuantGemma3Config.SUPPORTED_ENCODINGS),
    pipeline_model=AttnQuantGemma3Model,
    batching=_BatchProcessor,
    task=PipelineTask.TEXT_GENERATION,
    tokenizer=CheckedTextTokenizer,
    context_type=TextContext,
    default_weights_format=WeightsFormat.safetensors,
    multi_gpu_supported=False,
    weight_adapters={WeightsFormat.safetensors: convert_safetensor_state_dict},
    config=AttnQuantGemma3Config,
    # One device allocates no signal buffers, so none are reserved for.
    memory_planner=PagedMemoryPlanner.with_activation_reservation(0),
    supports_overlap_scheduler=False,
    supports_device_graph_capture=False,
)
