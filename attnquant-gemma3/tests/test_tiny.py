"""Tiny checkpoints: reproducible, read by transformers, and exact to tokenise."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from attnquant.testing.checkpoints import digest, read_checkpoint
from gemma3_support.tiny import BOS, tiny_config, tiny_weights, write_tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase as Tokenizer

# Of seed 0, the default model. A new value makes every golden record stale.
DIGEST: Final = "4106df19405b8fd6bec4d65826369c6041f3556fa5d900d0c379a2aa89470ac9"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return AutoTokenizer.from_pretrained(directory)


def test_the_default_weights_are_the_same_everywhere(directory: Path) -> None:
    assert digest(read_checkpoint(directory)[0]) == DIGEST


def test_a_written_checkpoint_is_what_was_asked_for(directory: Path) -> None:
    weights, config = read_checkpoint(directory)
    assert tiny_config() == config
    assert digest(tiny_weights(config, 0)) == digest(weights)


def test_more_layers_begin_with_the_layers_of_fewer() -> None:
    few = tiny_weights(tiny_config(num_layers=2), 0)
    many = tiny_weights(tiny_config(num_layers=3), 0)
    for name, tensor in few.items():
        np.testing.assert_array_equal(tensor, many[name])


def test_seeds_differ() -> None:
    config = tiny_config(num_layers=1)
    assert digest(tiny_weights(config, 0)) != digest(tiny_weights(config, 1))


def test_bfloat16_is_stored_as_bfloat16(tmp_path: Path) -> None:
    weights, _ = read_checkpoint(write_tiny_checkpoint(tmp_path, dtype="bfloat16"))
    assert {tensor.dtype.name for tensor in weights.values()} == {"bfloat16"}


@pytest.mark.parametrize("tied", [True, False])
def test_only_an_untied_head_is_stored(tmp_path: Path, *, tied: bool) -> None:
    weights, config = read_checkpoint(
        write_tiny_checkpoint(tmp_path, tie_word_embeddings=tied)
    )
    assert tied == config["tie_word_embeddings"]
    assert tied == ("lm_head.weight" not in weights)


def test_projections_have_the_shapes_that_the_config_says() -> None:
    weights = tiny_weights(tiny_config(num_layers=1), 0)
    shapes = {
        name.split(".")[-2]: tensor.shape
        for name, tensor in weights.items()
        if "_proj" in name
    }
    assert shapes == {
        "q_proj": (128, 96),
        "k_proj": (64, 96),
        "v_proj": (64, 96),
        "o_proj": (96, 128),
        "gate_proj": (160, 96),
        "up_proj": (160, 96),
        "down_proj": (96, 160),
    }


# --- as transformers and MAX read it ---------------------------------------------


def test_transformers_reads_every_field_that_max_asks_for(directory: Path) -> None:
    config = AutoConfig.from_pretrained(directory)
    assert config.architectures == ["Gemma3ForCausalLM"]
    assert vars(config)["_sliding_window_pattern"] == 6
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert (full, len(config.layer_types)) == ([5], 8)
    assert config.sliding_window == 128
    assert config.query_pre_attn_scalar == 24
    assert config.attention_bias is False
    assert config.attn_logit_softcapping is None
    assert config.final_logit_softcapping is None
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0


def test_overrides_reach_transformers(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    write_tiny_checkpoint(
        tmp_path,
        num_layers=3,
        sliding_window_pattern=2,
        rope_scaling=scaling,
        final_logit_softcapping=30.0,
    )
    config = AutoConfig.from_pretrained(tmp_path)
    assert vars(config)["_sliding_window_pattern"] == 2
    assert config.layer_types[1] == "full_attention"
    assert config.final_logit_softcapping == 30.0
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size 261 < 262"):
        write_tiny_checkpoint(tmp_path, vocab_size=261)


# --- tokenizer -------------------------------------------------------------------


# Lone surrogates are no text: UTF-8 has no bytes for them.
TEXTS: Final = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert text == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize(
    "text", ["<bos>", "a <eos> b", "<start_of_turn>user\n", " . , ' n't"]
)
def test_special_tokens_and_spaces_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert text == tokenizer.decode(tokenizer.encode(text))


def test_the_vocabulary_is_full(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == tiny_config()["vocab_size"]
    assert tokenizer.encode("the") != tokenizer.encode("eht")
    assert len(tokenizer.encode("the and")) < len("the and")


def test_bos_is_prepended_on_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_tiny_checkpoint(tmp_path, add_bos=True)
    with_bos = AutoTokenizer.from_pretrained(tmp_path)
    assert with_bos.encode("Hello") == [BOS, *tokenizer.encode("Hello")]


def test_the_chat_template_renders_turns(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<bos><start_of_turn>user\nHello<end_of_turn>\n"
        "<start_of_turn>model\nHi<end_of_turn>\n<start_of_turn>model\n"
    )


def test_every_file_is_json(directory: Path) -> None:
    for path in directory.glob("*.json"):
        assert json.loads(path.read_text(encoding="utf-8"))
