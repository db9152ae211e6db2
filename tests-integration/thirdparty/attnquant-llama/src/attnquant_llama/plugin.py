"""The plugin: five hooks. Light enough to import in milliseconds, and without MAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnquant.hookspecs import (
    Architecture,
    AttentionFactory,
    Grouping,
    PrefixMap,
    hookimpl,
    uniform,
)

if TYPE_CHECKING:
    from max.dtype import DType
    from max.graph import DeviceRef
    from max.nn.kv_cache import KVCacheParamInterface
    from max.pipelines.lib import KVCacheConfig, PipelineConfig

ARCHITECTURE = "LlamaForCausalLM"

PREFIX_MAP = PrefixMap(
    prefixes={"model.": "", "lm_head.": "lm_head."},
    ignored=("*.rotary_emb.inv_freq",),
)


@hookimpl
def attnquant_architectures() -> Sequence[Architecture]:
    """Name the one architecture."""
    target = "attnquant_llama.arch:llama_attnquant_arch"
    return [
        Architecture(ARCHITECTURE, target, api_version=1, tested_max=">=26.7,<26.8")
    ]


@hookimpl
def attnquant_prefix_map() -> PrefixMap:
    """Every checkpoint of this architecture is named in the same way."""
    return PREFIX_MAP


@hookimpl
def attnquant_w0_group(config: Mapping[str, Any]) -> Grouping:
    """All layers are alike: one unnamed group."""
    del config
    return uniform


@hookimpl
def attnquant_attention(config: Any) -> AttentionFactory:
    """Build attention layers for an `AttnQuantLlamaConfig`."""
    from attnquant_llama.layers.attention import attention_factory

    return attention_factory(config)


@hookimpl
def attnquant_kv_params(
    huggingface_config: Any,
    pipeline_config: PipelineConfig,
    devices: list[DeviceRef],
    kv_cache_config: KVCacheConfig,
    cache_dtype: DType,
) -> KVCacheParamInterface:
    """Return one cache for all layers."""
    from max.pipelines.architectures.llama3.model_config import Llama3Config

    return Llama3Config.construct_kv_params(
        huggingface_config, pipeline_config, devices, kv_cache_config, cache_dtype
    )
