"""Tiny checkpoints: reproducible, and read by transformers and MAX's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from transformers import AutoConfig, AutoTokenizer

from attnquant.testing.checkpoints import digest, read_checkpoint
from gemma4_support.tiny import (
    BOS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    tiny_config,
    write_tiny_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

# Of seed 0, the default model. A new value makes every golden record stale.
DIGEST: Final = "214d8290fdaea3a22a64553511a570431a3dc5a6c49d993023c54efd13a357e4"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_the_default_weights_are_the_same_everywhere(directory: Path) -> None:
    assert digest(read_checkpoint(directory)[0]) == DIGEST


def test_projections_have_the_shapes_that_the_config_says(directory: Path) -> None:
    weights, _ = read_checkpoint(directory)
    prefix = "model.language_model.layers.{}.self_attn."
    shapes = {
        i: {
            name.removeprefix(prefix.format(i)): tensor.shape
            for name, tensor in weights.items()
            if name.startswith(prefix.format(i)) and "_proj" in name
        }
        for i in (4, 5)
    }
    assert shapes[4] == {
        "q_proj.weight": (128, 96),
        "k_proj.weight": (64, 96),
        "v_proj.weight": (64, 96),
        "o_proj.weight": (96, 128),
    }
    assert shapes[5] == {
        "q_proj.weight": (256, 96),
        "k_proj.weight": (64, 96),
        "o_proj.weight": (96, 256),
    }


def test_transformers_reads_the_config_as_it_is_written(directory: Path) -> None:
    config = AutoConfig.from_pretrained(directory)
    written = tiny_config()["text_config"]
    read = config.text_config.to_dict()
    assert {name: read.get(name) for name in written} == written
    assert config.architectures == ["Gemma4ForConditionalGeneration"]


def test_the_vocabulary_is_full_and_text_comes_back(directory: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == VOCAB_SIZE
    for text in ("The capital of France", "日本", " . , ' n't"):
        ids = tokenizer.encode(text)
        assert ids[0] == BOS
        assert tokenizer.decode(ids[1:]) == text
    for i, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.convert_tokens_to_ids(token) == i
