"""The plugin's first three hooks: groups, names, and what is refused."""

from __future__ import annotations

from typing import Any, Final

import pytest

from attnquant.errors import CheckpointError
from attnquant.theta.grouping import UNNAMED, NoBase
from attnquant_gemma4 import plugin
from gemma4_support.tiny import Json, tiny_config, tiny_weights

PATTERN: Final = tiny_config()["text_config"]


def text_config(**fields: Json) -> dict[str, Any]:
    text: dict[str, Any] = tiny_config()["text_config"]
    return {**text, **fields}


def test_both_architectures_of_max_are_named() -> None:
    names = [found.name for found in plugin.attnquant_architectures()]
    assert names == [
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
    ]


# --- grouping --------------------------------------------------------------------


def test_attention_is_grouped_by_kind_and_the_mlp_is_not() -> None:
    group = plugin.attnquant_w0_group(PATTERN)
    assert group(0, "q_proj") == "sliding_attention"
    assert group(5, "q_proj") == "full_attention"
    assert group(5, "o_proj") == "full_attention"
    assert group(0, "up_proj") == group(5, "up_proj") == UNNAMED


@pytest.mark.parametrize(
    ("k_eq_v", "expected"), [(True, NoBase.ABSENT), (False, "full_attention")]
)
def test_full_layers_have_values_of_their_own_or_none(
    *, k_eq_v: bool, expected: object
) -> None:
    group = plugin.attnquant_w0_group(text_config(attention_k_eq_v=k_eq_v))
    assert group(5, "v_proj") == expected
    assert group(0, "v_proj") == "sliding_attention"


def test_without_a_list_every_sixth_and_the_last_layer_are_full() -> None:
    config = text_config(num_hidden_layers=8, layer_types=None)
    kinds = plugin.layer_types(config)
    assert [i for i, kind in enumerate(kinds) if kind == plugin.FULL] == [5, 7]


def test_the_last_layer_is_full_as_in_transformers() -> None:
    config = text_config(layer_types=["sliding_attention"] * 6)
    assert plugin.layer_types(config)[-1] == plugin.FULL


# --- prefix map ------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrapper", ["model.language_model.", "language_model.model.", "model."]
)
def test_every_wrapper_gives_canonical_names(wrapper: str) -> None:
    mapping = plugin.attnquant_prefix_map(tiny_config())
    names = [
        name.removeprefix("model.language_model.")
        for name in tiny_weights(tiny_config(), 0)
    ]
    for name in names:
        assert mapping.canonical(wrapper + name) == name
    assert mapping.canonical("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("tower", plugin.TOWERS)
def test_towers_keep_their_names(tower: str) -> None:
    mapping = plugin.attnquant_prefix_map(tiny_config())
    assert mapping.canonical(f"model.{tower}a.weight") == f"{tower}a.weight"
    assert mapping.canonical(f"{tower}a.weight") == f"{tower}a.weight"


def test_rotary_tables_are_ignored() -> None:
    mapping = plugin.attnquant_prefix_map(tiny_config())
    name = "model.language_model.rotary_emb.full_attention_inv_freq"
    assert mapping.canonical(name) is None


@pytest.mark.parametrize(
    "name", ["model.language_model.embed_tokens_per_layer.weight", "model.extra.weight"]
)
def test_an_unknown_tensor_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        plugin.attnquant_prefix_map(tiny_config()).canonical(name)


# --- what is refused -------------------------------------------------------------


def test_a_quantised_checkpoint_is_refused() -> None:
    config = tiny_config() | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CheckpointError, match=r"quantization_config: .* 'fp8'"):
        plugin.attnquant_prefix_map(config)


def test_a_head_tied_in_one_config_only_is_refused() -> None:
    config = tiny_config()
    config["tie_word_embeddings"] = False
    with pytest.raises(CheckpointError, match=r"text_config\.tie_word_embeddings"):
        plugin.attnquant_prefix_map(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_types": ["sliding_attention"] * 5},
            r"layer_types: expected 6 entries, one a layer, found 5 entries",
        ),
        (
            {"layer_types": [*["sliding_attention"] * 4, "linear", "full_attention"]},
            r"layer_types\[4\]: expected sliding_attention or .*, found 'linear'",
        ),
        ({"layer_types": "sliding"}, "layer_types: .* found 'sliding'"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: .* found 2"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: .* 256"),
        ({"attention_bias": True}, "attention_bias: .* found True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: .* found {'bits"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional.* found 'all'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            r"rope_parameters\.full_attention\.rope_type: .* found 'yarn'",
        ),
        (
            {"rope_parameters": {"full_attention": {"factor": 8.0}}},
            r"rope_parameters\.full_attention\.factor: .* found 8\.0",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            r"rope_parameters\.sliding_attention\.rope_type: .* found 'linear'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        plugin.attnquant_w0_group(text_config(**fields))


def test_per_layer_inputs_are_refused_where_they_are_the_default() -> None:
    config = text_config()
    del config["hidden_size_per_layer_input"]
    with pytest.raises(CheckpointError, match="hidden_size_per_layer_input"):
        plugin.attnquant_w0_group(config)
    config["model_type"] = "gemma4_unified_text"
    plugin.attnquant_w0_group(config)
