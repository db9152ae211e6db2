"""Llama's config with the decomposition's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from max.pipelines.architectures.llama3.model_config import Llama3Config
from max.pipelines.lib import MAXModelConfig, PipelineConfig
from max.pipelines.modeling.config_enums import SupportedEncoding

from attnquant.errors import ServingError
from attnquant.serving.api import AttnQuantConfigMixin, check_device, settings_of
from attnquant_llama.plugin import ARCHITECTURE


@dataclass(kw_only=True)
class AttnQuantLlamaConfig(AttnQuantConfigMixin, Llama3Config):
    """MAX's `Llama3Config`, with `lora_rank`, `shared_blocks` and their kin."""

    ARCHITECTURE: ClassVar[str] = ARCHITECTURE
    DEFAULT_ENCODING: ClassVar[SupportedEncoding] = "bfloat16"
    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {"bfloat16", "float32"}

    final_logit_softcapping: float | None = None
    """None: logits are what the head gives."""

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of each layer: all see everything before them."""
        return ("full_attention",) * self.num_hidden_layers

    @classmethod
    def initialize_from_config(
        cls,
        pipeline_config: PipelineConfig,
        huggingface_config: Any,
        model_config: MAXModelConfig | None = None,
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
        check_supported(huggingface_config.to_dict())
        config = super().initialize_from_config(
            pipeline_config, huggingface_config, model_config, max_seq_len=max_seq_len
        )
        config.apply_settings(settings_of(huggingface_config, config.num_hidden_layers))
        check_device(config)
        return config

    def projection_dims(self) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of each family; the same in every layer."""
        hidden, wide = self.hidden_size, self.intermediate_size
        head_dim = self.kv_params.head_dim
        q_dim = self.num_attention_heads * head_dim
        kv_dim = self.num_key_value_heads * head_dim
        return {
            "q_proj": (q_dim, hidden),
            "k_proj": (kv_dim, hidden),
            "v_proj": (kv_dim, hidden),
            "o_proj": (hidden, q_dim),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }


def check_supported(config: Mapping[str, Any]) -> None:
    """Refuse what the graph does not compute.

    Args:
        config: The decoder's part of `config.json`, as transformers completes it.

    Raises:
        ServingError: Naming the field.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    _allow("rope_parameters.rope_type", rope_type, "default", "llama3")
    _allow("hidden_act", config.get("hidden_act", "silu"), "silu")
    _allow("attention_bias", config.get("attention_bias"), None, False)
    _allow("mlp_bias", config.get("mlp_bias"), None, False)
    _allow("quantization_config", config.get("quantization_config"), None)


def _allow(field: str, found: object, *values: object) -> None:
    if found not in values:
        raise ServingError(
            f"config.json: {field}",
            expected=" or ".join(repr(value) for value in values),
            found=repr(found),
            hint="No other is served.",
        )
