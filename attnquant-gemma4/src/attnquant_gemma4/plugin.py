"""The plugin: five hooks. Light enough to import in milliseconds, and without MAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnquant.errors import CheckpointError
from attnquant.hookspecs import Architecture, AttentionFactory, hookimpl
from attnquant.theta.families import ATTN_FAMILIES
from attnquant.theta.grouping import UNNAMED, Group, Grouping, NoBase
from attnquant.theta.prefix_map import PrefixMap

if TYPE_CHECKING:
    from max.dtype import DType
    from max.graph import DeviceRef
    from max.nn.kv_cache import KVCacheParamInterface
    from max.pipelines.lib import KVCacheConfig, PipelineConfig

ARCHITECTURE = "Gemma4ForConditionalGeneration"
UNIFIED_ARCHITECTURE = "Gemma4UnifiedForConditionalGeneration"
"""The 12B line, whose decoder is the same."""

SLIDING, FULL = "sliding_attention", "full_attention"

VISION = ("vision_tower.", "embed_vision.")
"""Canonical prefixes of what encodes images, in MAX's own vision graph."""

TOWERS = (
    *VISION,
    "vision_embedder.",
    "audio_tower.",
    "embed_audio.",
)
"""Canonical prefixes of what is not the decoder's. A bundle keeps it untouched."""

PREFIX_MAP = PrefixMap(
    prefixes={
        # Inside the multimodal wrapper, by newer and older transformers; and bare.
        **{
            wrapper + part: part
            for wrapper in ("model.language_model.", "language_model.model.", "model.")
            for part in ("embed_tokens.", "layers.", "norm.")
        },
        "lm_head.": "lm_head.",
        "language_model.lm_head.": "lm_head.",
        **{wrapper + tower: tower for wrapper in ("model.", "") for tower in TOWERS},
    },
    ignored=("*.rotary_emb.*inv_freq",),
)


@hookimpl
def attnquant_architectures() -> Sequence[Architecture]:
    """Name both architectures."""
    targets = {
        ARCHITECTURE: "attnquant_gemma4.arch:gemma4_attnquant_arch",
        UNIFIED_ARCHITECTURE: "attnquant_gemma4.arch:gemma4_unified_attnquant_arch",
    }
    return [
        Architecture(name, target, api_version=1, tested_max=">=26.7,<26.8")
        for name, target in targets.items()
    ]


@hookimpl
def attnquant_prefix_map(config: Mapping[str, Any]) -> PrefixMap:
    """Every checkpoint of this architecture is named in the same few ways.

    Raises:
        CheckpointError: If the checkpoint is quantised, or wrapper and decoder disagree
            on whether the head is tied.
    """
    tied = config.get("tie_word_embeddings", True)
    decoder_tied = config.get("text_config", {}).get("tie_word_embeddings", tied)
    _allow("quantization_config", config.get("quantization_config"), None)
    _allow("text_config.tie_word_embeddings", decoder_tied, tied)
    return PREFIX_MAP


@hookimpl
def attnquant_w0_group(config: Mapping[str, Any]) -> Grouping:
    """Group attention by kind of layer: the two kinds have different head dims.

    Raises:
        CheckpointError: If the config asks for what is not served, naming it.
    """
    check_supported(config)
    kinds = layer_types(config)
    k_eq_v = bool(config.get("attention_k_eq_v"))

    def group(layer: int, family: str) -> Group:
        if family not in ATTN_FAMILIES:
            return UNNAMED
        if family == "v_proj" and k_eq_v and kinds[layer] == FULL:
            return NoBase.ABSENT
        return kinds[layer]

    return group


@hookimpl
def attnquant_attention(config: Any) -> AttentionFactory:
    """Build attention layers for an `AttnQuantGemma4Config`."""
    from attnquant_gemma4.layers.attention import attention_factory

    return attention_factory(config)


@hookimpl
def attnquant_kv_params(
    huggingface_config: Any,
    pipeline_config: PipelineConfig,
    devices: list[DeviceRef],
    kv_cache_config: KVCacheConfig,
    cache_dtype: DType,
) -> KVCacheParamInterface:
    """Return a cache for sliding layers and one for full layers, of other head dims."""
    from max.pipelines.architectures.gemma4.model_config import Gemma4TextConfig

    from attnquant_gemma4.model_config import decoder_config

    return Gemma4TextConfig.construct_kv_params(
        decoder_config(huggingface_config),
        pipeline_config,
        devices,
        kv_cache_config,
        cache_dtype,
    )


def layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer, `SLIDING` or `FULL`.

    Args:
        config: The decoder's part of `config.json`.

    Raises:
        CheckpointError: If the list is of another length than the layers, or names
            an unknown kind.
    """
    num_layers = int(config["num_hidden_layers"])
    listed = config.get("layer_types")
    if listed is None:
        listed = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)]
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        raise CheckpointError(
            "config.json: layer_types",
            expected=f"{num_layers} entries, one a layer",
            found=repr(listed) if isinstance(listed, str) else f"{len(listed)} entries",
        )
    for layer, kind in enumerate(listed):
        if kind not in {SLIDING, FULL}:
            raise CheckpointError(
                f"config.json: layer_types[{layer}]",
                expected=f"{SLIDING} or {FULL}",
                found=repr(kind),
            )
    # transformers makes the last layer a full one, whatever the list says.
    return (*listed[:-1], FULL)


def check_supported(config: Mapping[str, Any]) -> None:
    """Refuse what MAX's Gemma 4 does not serve, and what would be computed wrongly.

    Args:
        config: The decoder's part of `config.json`, as it stands there or as
            transformers completes it.

    Raises:
        CheckpointError: Naming the field.
    """
    # transformers fills in these values where the field is missing.
    unified = "unified" in str(config.get("model_type"))
    per_layer = config.get("hidden_size_per_layer_input", 0 if unified else 256)
    _allow("hidden_size_per_layer_input", per_layer, 0, None)
    _allow("num_kv_shared_layers", config.get("num_kv_shared_layers"), 0, None)
    _allow("attention_bias", config.get("attention_bias"), 0, None)
    _allow("quantization_config", config.get("quantization_config"), None)
    bidirectional = config.get("use_bidirectional_attention")
    _allow("use_bidirectional_attention", bidirectional, None, "vision")
    rope = config.get("rope_parameters") or {}
    for kind, rope_type in ((FULL, "proportional"), (SLIDING, "default")):
        found = rope.get(kind) or {}
        field = f"rope_parameters.{kind}"
        _allow(f"{field}.rope_type", found.get("rope_type", rope_type), rope_type)
        _allow(f"{field}.factor", found.get("factor"), None, 1)


def check_vision(config: Mapping[str, Any]) -> None:
    """Refuse a vision tower that MAX's vision graph would compute wrongly.

    Args:
        config: The tower's part of `config.json`.

    Raises:
        CheckpointError: Naming the field.
    """
    for name in ("attention_bias", "use_clipped_linears"):
        _allow(f"vision_config.{name}", config.get(name), 0, None)


def _allow(field: str, found: object, *values: object) -> None:
    if found not in values:
        raise CheckpointError(
            f"config.json: {field}",
            expected=" or ".join(repr(value) for value in values),
            found=repr(found),
            hint="No other is served.",
        )
