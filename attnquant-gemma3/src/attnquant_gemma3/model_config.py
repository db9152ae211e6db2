"""Gemma 3's config with the decomposition's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MultiKVCacheParams
from max.pipelines.architectures.gemma3.model_config import Gemma3Config
from max.pipelines.architectures.gpt_oss.hybrid_kv_params_util import (
    hybrid_swa_full_kv_params,
)
from max.pipelines.kv_cache import cache_dtype_for_encoding
from max.pipelines.lib import KVCacheConfig, PipelineConfig
from max.pipelines.modeling.config_enums import SupportedEncoding

from attnquant.errors import ServingError
from attnquant.serving.model_config import AttnQuantConfigMixin, settings_of

MIN_CPU_WINDOW = 128
"""MAX's CPU attention does not compile for sliding windows narrower than this."""


@dataclass(kw_only=True)
class AttnQuantGemma3Config(AttnQuantConfigMixin, Gemma3Config):
    """MAX's `Gemma3Config`, with `lora_rank`, `shared_blocks` and their kin."""

    DEFAULT_ENCODING: ClassVar[SupportedEncoding] = "bfloat16"
    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {"bfloat16", "float32"}

    layer_types: tuple[str, ...] = ()
    """``sliding_attention`` or ``full_attention``, for each layer."""

    @classmethod
    def initialize_from_config(
        cls,
        pipeline_config: PipelineConfig,
        huggingface_config: Any,
        *,
        max_seq_len: int,
    ) -> Self:
        """Build the config, refusing what the graph would compute wrongly.

        Raises:
            SettingError: If an environment variable is out of range or contradicts
                the bundle.
            ServingError: If the checkpoint or the device asks for something that is
                not supported, naming it.
        """
        _check_supported(huggingface_config)
        config = super().initialize_from_config(
            pipeline_config, huggingface_config, max_seq_len=max_seq_len
        )
        config.layer_types = tuple(huggingface_config.layer_types)
        # MAX lays the cache out by the pattern; the list of types may be irregular.
        config.kv_params = cls.construct_kv_params(
            huggingface_config,
            pipeline_config,
            config.devices,
            pipeline_config.model.kv_cache,
            cache_dtype_for_encoding(
                config.quantization_encoding,
                pipeline_config.model.kv_cache.kv_cache_format,
            ),
        )
        config.apply_settings(settings_of(huggingface_config, config.num_hidden_layers))
        _check_device(config)
        return config

    @classmethod
    def construct_kv_params(
        cls,
        huggingface_config: Any,
        pipeline_config: PipelineConfig,
        devices: list[DeviceRef],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
        *,
        allow_kv_head_replication: bool = False,
    ) -> MultiKVCacheParams:
        """Return a cache for sliding layers and one for full layers."""
        return hybrid_swa_full_kv_params(
            layer_types=huggingface_config.layer_types,
            sliding_window=huggingface_config.sliding_window,
            pipeline_config=pipeline_config,
            devices=devices,
            kv_cache_config=kv_cache_config,
            cache_dtype=cache_dtype,
            n_kv_heads=huggingface_config.num_key_value_heads,
            head_dim=huggingface_config.head_dim,
            allow_kv_head_replication=allow_kv_head_replication,
        )

    def projection_dims(self) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of each family; the same in every layer."""
        hidden, wide = self.hidden_size, self.intermediate_size
        q_dim = self.num_attention_heads * self.head_dim
        kv_dim = self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (q_dim, hidden),
            "k_proj": (kv_dim, hidden),
            "v_proj": (kv_dim, hidden),
            "o_proj": (hidden, q_dim),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }


def _check_supported(huggingface_config: Any) -> None:
    for field in (
        "attn_logit_softcapping",
        "use_bidirectional_attention",
        "quantization_config",
    ):
        if value := getattr(huggingface_config, field, None):
            raise ServingError(
                f"config.json: {field}",
                expected="null or false (this is not supported)",
                found=repr(value),
            )
    if len(huggingface_config.layer_types) != huggingface_config.num_hidden_layers:
        raise ServingError(
            "config.json: layer_types",
            expected=f"{huggingface_config.num_hidden_layers} entries, one a layer",
            found=str(len(huggingface_config.layer_types)),
        )


def _check_device(config: AttnQuantGemma3Config) -> None:
    device = config.devices[0]
    if len(config.devices) > 1:
        raise ServingError(
            "--devices", expected="one device", found=str(len(config.devices))
        )
    if not device.is_cpu():
        return
    if config.dtype != DType.float32:
        raise ServingError(
            "--quantization-encoding",
            expected="float32 on a CPU",
            found=str(config.quantization_encoding),
            hint="Add `--quantization-encoding float32`.",
        )
    if config.sliding_window < MIN_CPU_WINDOW:
        raise ServingError(
            "config.json: sliding_window",
            expected=f"at least {MIN_CPU_WINDOW} on a CPU",
            found=str(config.sliding_window),
            hint="MAX cannot compile narrower windows for CPUs; a GPU can serve it.",
        )
