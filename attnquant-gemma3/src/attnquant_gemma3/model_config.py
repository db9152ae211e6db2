"""Gemma 3's config with the decomposition's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from max.pipelines.architectures.gemma3.model_config import Gemma3Config
from max.pipelines.kv_cache import cache_dtype_for_encoding
from max.pipelines.lib import PipelineConfig
from max.pipelines.modeling.config_enums import SupportedEncoding

from attnquant.errors import ServingError
from attnquant.serving.device import check_device, check_sandwich_norms
from attnquant.serving.model_config import AttnQuantConfigMixin, settings_of
from attnquant_gemma3.plugin import ARCHITECTURE


@dataclass(kw_only=True)
class AttnQuantGemma3Config(AttnQuantConfigMixin, Gemma3Config):
    """MAX's `Gemma3Config`, with `lora_rank`, `shared_blocks` and their kin."""

    ARCHITECTURE: ClassVar[str] = ARCHITECTURE
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
        check_device(config)
        check_sandwich_norms(config, config.hidden_size)
        return config

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
