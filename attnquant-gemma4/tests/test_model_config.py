"""The config, and the hooks that need MAX: attention and KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MultiKVCacheParams
from max.pipelines.lib import PipelineConfig
from max.pipelines.lib.config import PipelineArgs
from transformers import AutoConfig

from attnquant.errors import CheckpointError
from attnquant.plugins import Supplied, installed_plugins
from attnquant.serving.projections import ProjectionMaker
from attnquant.theta import FAMILIES, make_layout
from attnquant.theta.families import ATTN_FAMILIES
from attnquant.theta.names import ProjectionKey
from attnquant_gemma4.layers.attention import AttnQuantGemma4Attention
from attnquant_gemma4.model_config import AttnQuantGemma4Config, decoder_config
from gemma4_support.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def supplied() -> Supplied:
    return installed_plugins().find("Gemma4ForConditionalGeneration")


@pytest.fixture(scope="module")
def pipeline_config(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("plugin") / "tiny")
    return PipelineConfig.from_args(
        PipelineArgs.from_flat_kwargs(
            model_path=str(path),
            device_specs="cpu",
            quantization_encoding="float32",
            custom_architectures=["attnquant"],
        )
    )


@pytest.fixture(scope="module")
def config(pipeline_config: PipelineConfig) -> AttnQuantGemma4Config:
    return AttnQuantGemma4Config.initialize(pipeline_config, max_seq_len=256)


def test_the_config_carries_the_four_fields(config: AttnQuantGemma4Config) -> None:
    assert config.shared_blocks == 6
    assert config.lora_rank == 0
    assert config.tie_families == "all"
    assert config.tied_projections == FAMILIES


def test_the_config_stands_in_for_that_of_the_wrapper(
    config: AttnQuantGemma4Config,
) -> None:
    assert config.text_config is config
    assert config.vision_config is None
    assert config.unquantized_dtype == DType.float32
    assert config.get_max_seq_len() == 256
    assert config.hidden_activation == "gelu_tanh"


def test_there_is_no_single_rope(config: AttnQuantGemma4Config) -> None:
    assert config.global_rope_theta == 1_000_000.0
    assert config.sliding_window_rope_theta == 10_000.0
    with pytest.raises(ValueError, match="global_rope_theta or sliding"):
        _ = config.rope_theta


def test_projections_have_their_layers_dimensions(
    config: AttnQuantGemma4Config,
) -> None:
    sliding, full = config.projection_dims(0), config.projection_dims(5)
    assert {name: sliding[name] for name in ATTN_FAMILIES} == {
        "q_proj": (128, 96),
        "k_proj": (64, 96),
        "v_proj": (64, 96),
        "o_proj": (96, 128),
    }
    assert (full["q_proj"], full["o_proj"]) == ((256, 96), (96, 256))
    assert "v_proj" not in full
    assert sliding["up_proj"] == full["up_proj"] == (160, 96)


def test_the_attention_factory_gives_each_layer_its_kind_and_place_in_the_cache(
    supplied: Supplied, config: AttnQuantGemma4Config
) -> None:
    dims = [config.projection_dims(i) for i in range(6)]
    shapes = {
        ProjectionKey(i, name): dims[i][name] for i in range(6) for name in dims[i]
    }
    layout = make_layout(
        shapes,
        num_layers=6,
        shared_blocks=1,
        lora_rank=4,
        grouping=supplied.grouping(
            {"num_hidden_layers": 6, "model_type": "gemma4_unified_text"}
            | {"attention_k_eq_v": True}
        ),
    )
    maker = ProjectionMaker(layout, "gemm", DType.float32, DeviceRef.CPU())
    build: Any = supplied.attention_factory(config)
    layers = [build(i, maker.make(i, dims[i])) for i in range(6)]
    assert all(isinstance(layer, AttnQuantGemma4Attention) for layer in layers)
    assert [layer.use_local for layer in layers] == [True] * 5 + [False]
    assert [layer.layer_idx_in_cache for layer in layers] == [0, 1, 2, 3, 4, 0]
    assert [layer.head_dim for layer in layers] == [32] * 5 + [64]
    names = set(layers[0].raw_state_dict())
    assert {"q_proj.U", "v_proj.s", "o_proj.V", "k_norm.weight"} <= names
    assert not any("weight" in name and "proj" in name for name in names)
    # The only full layer has its bases for itself, and no values.
    assert set(layers[5].raw_state_dict()) == {"q_norm.weight", "k_norm.weight"}


def test_kv_params_agree_with_the_config(
    supplied: Supplied, pipeline_config: PipelineConfig, config: AttnQuantGemma4Config
) -> None:
    params = supplied.kv_params(
        huggingface_config=pipeline_config.model.huggingface_config,
        pipeline_config=pipeline_config,
        devices=[DeviceRef.CPU()],
        kv_cache_config=pipeline_config.model.kv_cache,
        cache_dtype=DType.float32,
    )
    assert isinstance(params, MultiKVCacheParams)
    found = {
        kind: (child.num_layers, child.n_kv_heads, child.head_dim)
        for kind, child in params.children.items()
    }
    assert found == {"sliding_attention": (5, 2, 32), "full_attention": (1, 1, 64)}
    assert isinstance(config.kv_params, MultiKVCacheParams)
    assert config.kv_params.children.keys() == params.children.keys()


# --- the decoder's config --------------------------------------------------------


def test_the_decoder_takes_over_the_wrappers_bundle_block(tmp_path: Path) -> None:
    wrapper = AutoConfig.from_pretrained(write_tiny_checkpoint(tmp_path))
    assert not hasattr(decoder_config(wrapper), "attnquant")
    wrapper.attnquant = {"format_version": 1}
    decoder = decoder_config(wrapper)
    assert decoder.attnquant == {"format_version": 1}
    assert decoder_config(decoder).attnquant == {"format_version": 1}
    assert not hasattr(wrapper.text_config, "attnquant")


def test_global_kv_heads_mean_nothing_where_keys_are_no_values(tmp_path: Path) -> None:
    # As in transformers, which reads the field under `attention_k_eq_v` alone.
    path = write_tiny_checkpoint(tmp_path, attention_k_eq_v=False)
    wrapper = AutoConfig.from_pretrained(path)
    assert wrapper.text_config.num_global_key_value_heads == 1
    assert decoder_config(wrapper).num_global_key_value_heads is None


def test_the_unified_line_has_neither_experts_nor_inputs_per_layer(
    tmp_path: Path,
) -> None:
    path = write_tiny_checkpoint(tmp_path, unified=True)
    wrapper = AutoConfig.from_pretrained(path)
    for name in ("enable_moe_block", "num_experts", "hidden_size_per_layer_input"):
        if hasattr(wrapper.text_config, name):
            delattr(wrapper.text_config, name)
    decoder = decoder_config(wrapper)
    assert not decoder.enable_moe_block
    assert not decoder.num_experts
    assert not decoder.hidden_size_per_layer_input


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, num_kv_shared_layers=2)
    wrapper = AutoConfig.from_pretrained(path)
    with pytest.raises(CheckpointError, match="num_kv_shared_layers"):
        decoder_config(wrapper)
