"""The plugin: five hooks. Light enough to import in milliseconds, and without MAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnquant.hookspecs import Architecture, AttentionFactory, hookimpl
from attnquant.theta.grouping import Grouping, uniform
from attnquant.theta.prefix_map import PrefixMap

if TYPE_CHECKING:
    from max.dtype import DType
    from max.graph import DeviceRef
    from max.nn.kv_cache import KVCacheParamInterface
    from max.pipelines.lib import KVCacheConfig, PipelineConfig

ARCHITECTURE = "Gemma3ForCausalLM"

PREFIX_MAP = PrefixMap(
    prefixes={
        "model.": "",
        "lm_head.": "lm_head.",
        # As saved from within the multimodal wrapper, by older and newer transformers.
        "language_model.model.": "",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "",
    },
    ignored=("*.rotary_emb.inv_freq",),
)


@hookimpl
def attnquant_architectures() -> Sequence[Architecture]:
    """Name the one architecture."""
    target = "attnquant_gemma3.arch:gemma3_attnquant_arch"
    return [
        Architecture(ARCHITECTURE, target, api_version=1, tested_max=">=26.7,<26.8")
    ]


@hookimpl
def attnquant_prefix_map() -> PrefixMap:
    """Every checkpoint of this architecture is named in the same few ways."""
    return PREFIX_MAP


@hookimpl
def attnquant_w0_group(config: Mapping[str, Any]) -> Grouping:
    """Sliding and full layers have the same shapes: one unnamed group."""
    del config
    return uniform


@hookimpl
def attnquant_attention(config: Any) -> AttentionFactory:
    """Build attention layers for an `AttnQuantGemma3Config`."""
    from attnquant_gemma3.layers.attention import attention_factory

    return attention_factory(config)


@hookimpl
def attnquant_kv_params(
    huggingface_config: Any,
    pipeline_config: PipelineConfig,
    devices: list[DeviceRef],
    kv_cache_config: KVCacheConfig,
    cache_dtype: DType,
) -> KVCacheParamInterface:
    """Return a cache for sliding layers and one for full layers."""
    from max.pipelines.architectures.gpt_oss.hybrid_kv_params_util import (
        hybrid_swa_full_kv_params,
    )

    return hybrid_swa_full_kv_params(
        layer_types=huggingface_config.layer_types,
        sliding_window=huggingface_config.sliding_window,
        pipeline_config=pipeline_config,
        devices=devices,
        kv_cache_config=kv_cache_config,
        cache_dtype=cache_dtype,
        n_kv_heads=huggingface_config.num_key_value_heads,
        head_dim=huggingface_config.head_dim,
    )
