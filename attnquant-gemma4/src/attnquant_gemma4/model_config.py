"""Gemma 4's config with the decomposition's settings."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from max.dtype import DType
from max.pipelines.architectures.gemma4.model_config import (
    Gemma4ForConditionalGenerationConfig,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)
from max.pipelines.lib import MAXModelConfig, PipelineConfig
from max.pipelines.lib.config.model_config import _select_quantization_encoding
from max.pipelines.modeling.config_enums import SupportedEncoding

from attnquant.errors import CheckpointError, ServingError
from attnquant.serving.device import check_device, check_sandwich_norms
from attnquant.serving.model_config import AttnQuantConfigMixin, settings_of
from attnquant.theta.checkpoint import BUNDLE_KEY
from attnquant_gemma4.plugin import (
    ARCHITECTURE,
    FULL,
    attnquant_prefix_map,
    check_supported,
    check_vision,
    layer_types,
)

# Fields that MAX reads and that the config of the unified line does not have.
_NOT_IN_UNIFIED: dict[str, object] = {
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}


@dataclass(kw_only=True)
class AttnQuantGemma4Config(AttnQuantConfigMixin, Gemma4TextConfig):
    """MAX's `Gemma4TextConfig`, with `lora_rank`, `shared_blocks` and their kin.

    It also stands in for MAX's config of the multimodal wrapper, which holds a text
    config and a vision config.
    """

    ARCHITECTURE: ClassVar[str] = ARCHITECTURE
    DEFAULT_ENCODING: ClassVar[SupportedEncoding] = "bfloat16"
    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {"bfloat16", "float32"}

    vision_config: Gemma4VisionConfig | None = None
    """None: only text is served."""

    @property
    def text_config(self) -> Self:
        """The decoder's config, which this is."""
        return self

    @property
    def unquantized_dtype(self) -> DType:
        """The dtype of norms, embedding and head: that of everything else."""
        return self.dtype

    @classmethod
    def initialize(
        cls,
        pipeline_config: PipelineConfig,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> Self:
        """Build the config from all of `config.json`, where a bundle's block is."""
        model_config = model_config or pipeline_config.model
        return cls.initialize_from_config(
            pipeline_config, model_config.huggingface_config, max_seq_len=max_seq_len
        )

    @classmethod
    def initialize_from_config(
        cls,
        pipeline_config: PipelineConfig,
        huggingface_config: Any,
        *,
        max_seq_len: int,
    ) -> Self:
        """Build the config, refusing what the graph would compute wrongly.

        Args:
            pipeline_config: MAX's.
            huggingface_config: The wrapper's or the decoder's.
            max_seq_len: The longest sequence.

        Raises:
            SettingError: If an environment variable is out of range or contradicts
                the bundle.
            CheckpointError: If the checkpoint asks for something that is not
                supported, naming it.
            ServingError: If the device does.
        """
        decoder = decoder_config(huggingface_config)
        # MAX's passes sentinels for `rope_theta` and `rope_scaling`, of which there
        # is one for each kind of layer.
        config = super().initialize_from_config(
            pipeline_config, decoder, max_seq_len=max_seq_len
        )
        config.apply_settings(settings_of(decoder, config.num_hidden_layers))
        check_device(config)
        check_sandwich_norms(config, config.hidden_size)
        if serves_images(huggingface_config, pipeline_config.model):
            check_vision(huggingface_config.vision_config.to_dict())
            config.vision_config = Gemma4VisionConfig.initialize_from_config(
                huggingface_config.vision_config
            )
        return config

    @classmethod
    def calculate_max_seq_len(
        cls, huggingface_config: Any, model_config: MAXModelConfig
    ) -> int:
        """Return the longest sequence, by the decoder's config."""
        return super().calculate_max_seq_len(
            decoder_config(huggingface_config), model_config
        )

    @classmethod
    def estimate_vision_cache_entry_bytes(cls, huggingface_config: Any) -> int:
        """Return what MAX reserves for one encoded image; 0 without a vision tower.

        MAX asks before it says for which device, so on a CPU, where no image is
        encoded, it reserves as well.
        """
        if not has_vision_tower(huggingface_config):
            return 0
        return Gemma4ForConditionalGenerationConfig.estimate_vision_cache_entry_bytes(
            huggingface_config
        )

    @classmethod
    def get_vision_cache_row_spec(
        cls, huggingface_config: Any
    ) -> tuple[int, DType] | None:
        """Return width and dtype of an encoded image's rows; None without a tower."""
        if not has_vision_tower(huggingface_config):
            return None
        return Gemma4ForConditionalGenerationConfig.get_vision_cache_row_spec(
            huggingface_config
        )

    def head_dims(self, layer: int) -> tuple[int, int]:
        """Return the head dim of a layer, and how many KV heads it has."""
        if self.layer_types[layer] == FULL:
            return self.global_head_dim, self.num_global_key_value_heads
        return self.head_dim, self.num_key_value_heads

    def has_v_proj(self, layer: int) -> bool:
        """Whether a layer has a value projection, or takes its keys for values."""
        return not (self.attention_k_eq_v and self.layer_types[layer] == FULL)

    def projection_dims(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of each family that a layer has."""
        hidden, wide = self.hidden_size, self.intermediate_size
        head_dim, kv_heads = self.head_dims(layer)
        q_dim, kv_dim = self.num_attention_heads * head_dim, kv_heads * head_dim
        dims = {
            "q_proj": (q_dim, hidden),
            "k_proj": (kv_dim, hidden),
            "v_proj": (kv_dim, hidden),
            "o_proj": (hidden, q_dim),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }
        if not self.has_v_proj(layer):
            del dims["v_proj"]
        return dims


def has_vision_tower(huggingface_config: Any) -> bool:
    """Return whether a config describes a vision tower that MAX's vision graph is of.

    The unified line has another encoder, which MAX does not have.
    """
    unified = "unified" in str(getattr(huggingface_config, "model_type", None))
    return (
        not unified and getattr(huggingface_config, "vision_config", None) is not None
    )


def serves_images(huggingface_config: Any, model_config: MAXModelConfig) -> bool:
    """Return whether MAX's vision graph is served beside the decoder.

    Its attention is a kernel for GPUs (`flash_attention_ragged_gpu`), with no other
    for CPUs, and MAX's cache of encoded images holds bfloat16 only.

    Args:
        huggingface_config: The wrapper's; the decoder's has no vision tower.
        model_config: MAX's, which says where the model runs, and in which dtype.
    """
    default = AttnQuantGemma4Config.DEFAULT_ENCODING
    return (
        has_vision_tower(huggingface_config)
        and all(spec.device_type == "gpu" for spec in model_config.device_specs)
        and _select_quantization_encoding(model_config, default) == "bfloat16"
    )


def decoder_config(huggingface_config: Any) -> Any:
    """Return the decoder's config, checked, as MAX and this package read it.

    Args:
        huggingface_config: transformers' config of the wrapper, whose bundle block
            and tied head the result takes over; or of the decoder.

    Raises:
        CheckpointError: If the checkpoint asks for something that is not supported.
    """
    wrapped = getattr(huggingface_config, "text_config", None)
    decoder = copy.copy(wrapped or huggingface_config)
    if wrapped is not None:
        attnquant_prefix_map(huggingface_config.to_dict())
        if (block := getattr(huggingface_config, BUNDLE_KEY, None)) is not None:
            setattr(decoder, BUNDLE_KEY, block)
    check_supported(decoder.to_dict())
    layer_types(decoder.to_dict())
    for name, value in _NOT_IN_UNIFIED.items():
        if not hasattr(decoder, name):
            setattr(decoder, name, value)
    if not decoder.attention_k_eq_v:
        # As in transformers; MAX reads the field in any case.
        decoder.num_global_key_value_heads = None
    _check_experts(decoder)
    return decoder


def _check_experts(decoder: Any) -> None:
    if not decoder.enable_moe_block:
        return
    counts = {
        name: getattr(decoder, name)
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size")
    }
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise CheckpointError(
                f"config.json: {name}",
                expected="a positive number, since enable_moe_block is set",
                found=repr(count),
            )
    if counts["top_k_experts"] > counts["num_experts"]:
        raise CheckpointError(
            "config.json: top_k_experts",
            expected=f"at most num_experts, {counts['num_experts']}",
            found=str(counts["top_k_experts"]),
        )
    if decoder.hidden_activation != "gelu_pytorch_tanh":
        raise ServingError(
            "config.json: hidden_activation",
            expected="gelu_pytorch_tanh, which MAX's experts compute",
            found=repr(decoder.hidden_activation),
        )
