"""The plugin's hooks, called as core calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MultiKVCacheParams
from max.pipelines.lib import PipelineConfig
from max.pipelines.lib.config import PipelineArgs

from attnquant.plugins import Supplied, installed_plugins
from attnquant.serving.projections import ProjectionMaker
from attnquant.testing.checkpoints import read_checkpoint
from attnquant.theta import FAMILIES, UNNAMED, make_layout
from attnquant.theta.names import ProjectionKey
from attnquant_gemma3.layers.attention import AttnQuantGemma3Attention
from attnquant_gemma3.model_config import AttnQuantGemma3Config
from gemma3_support.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def supplied() -> Supplied:
    return installed_plugins().find("Gemma3ForCausalLM")


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
def config(pipeline_config: PipelineConfig) -> AttnQuantGemma3Config:
    return AttnQuantGemma3Config.initialize(pipeline_config, max_seq_len=256)


def test_the_prefix_map_covers_each_tensor_of_a_checkpoint_once(
    supplied: Supplied, tmp_path: Path
) -> None:
    weights, config = read_checkpoint(write_tiny_checkpoint(tmp_path / "tiny"))
    sources = supplied.prefix_map(config).rename(weights)
    assert sorted(weights) == sorted(sources.values())
    assert "layers.0.self_attn.q_proj.weight" in sources


def test_all_layers_of_a_band_may_share(supplied: Supplied) -> None:
    grouping = supplied.grouping({})
    assert {grouping(layer, family) for layer in range(8) for family in FAMILIES} == {
        UNNAMED
    }


def test_the_attention_factory_gives_each_layer_its_kind_and_place_in_the_cache(
    supplied: Supplied, config: AttnQuantGemma3Config
) -> None:
    dims = config.projection_dims()
    layout = make_layout(
        {ProjectionKey(i, family): dims[family] for i in range(8) for family in dims},
        num_layers=8,
        shared_blocks=3,
        lora_rank=4,
    )
    maker = ProjectionMaker(layout, "gemm", DType.float32, DeviceRef.CPU())
    build: Any = supplied.attention_factory(config)
    layers = [build(i, maker.make(i, dims)) for i in range(8)]
    assert all(isinstance(layer, AttnQuantGemma3Attention) for layer in layers)
    assert [layer.is_sliding for layer in layers] == [True] * 5 + [False] + [True] * 2
    assert [layer.layer_idx for layer in layers] == [0, 1, 2, 3, 4, 0, 5, 6]
    assert layers[0].scale == 24**-0.5
    assert layers[0].q_norm.dtype == DType.float32
    names = set(layers[1].raw_state_dict())
    assert {"q_proj.U", "o_proj.V", "k_norm.weight"} <= names
    assert not any("weight" in name and "proj" in name for name in names)


def test_kv_params_agree_with_the_config(
    supplied: Supplied, pipeline_config: PipelineConfig, config: AttnQuantGemma3Config
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
    assert found == {"sliding_attention": (7, 2, 32), "full_attention": (1, 2, 32)}
    assert isinstance(config.kv_params, MultiKVCacheParams)
    assert config.kv_params.children.keys() == params.children.keys()


def test_the_config_carries_the_four_fields(config: AttnQuantGemma3Config) -> None:
    assert config.shared_blocks == 8
    assert config.lora_rank == 0
    assert config.tie_families == "all"
    assert config.tied_projections == FAMILIES
    assert config.hidden_activation == "gelu_tanh"
