"""A tiny byte-level tokenizer, in the files that transformers and MAX read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SPECIAL_TOKENS: Final = ("<pad>", "<eos>", "<bos>", "<unk>")
"""Those that every tiny tokenizer has, in this order, from id 0."""

PAD, EOS, BOS, UNK = range(len(SPECIAL_TOKENS))

# Merges in order of priority, "Ġ" being a blank in GPT-2's byte alphabet. As many are
# used as fill a vocabulary up.
_MERGES: Final = """
    Ġ,t h,e i,n r,e a,n e,r Ġ,a o,n Ġt,he o,r Ġ,s e,n a,t e,s Ġ,w i,t i,s Ġ,c o,u
    n,d in,g Ġ,o e,d Ġ,b Ġ,f Ġ,p a,r a,l Ġ,in Ġo,f Ġ,m Ġa,n Ġan,d a,s Ġt,o l,e r,o
    Ġ,h i,c Ġ,d s,t i,on l,l o,m v,e en,t Ġ,l c,h Ġ,n u,t Ġ,e o,w Ġ,g Ġ,re t,er a,d
    r,i h,a
"""
_BYTES: Final = 256

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""A template for models that have none of their own."""


def write_tokenizer(
    directory: Path,
    *,
    vocab_size: int = 320,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    add_bos: bool = False,
    chat_template: str = CHAT_TEMPLATE,
    max_length: int = 1024,
) -> None:
    """Write a byte-level BPE tokenizer and its companions.

    Args:
        directory: Where to.
        vocab_size: How many tokens; merges fill up what bytes and special tokens
            leave, as far as there are any.
        special_tokens: The first ids; `SPECIAL_TOKENS` must be among them.
        add_bos: Whether <bos> is put in front of a text. Without it
            ``decode(encode(text)) == text``.
        chat_template: In Jinja.
        max_length: What the configuration says.

    Raises:
        ValueError: If `vocab_size` is below that of bytes and special tokens.
    """
    least = _BYTES + len(special_tokens)
    if vocab_size < least:
        msg = f"vocab_size {vocab_size} < {least} of the tokenizer"
        raise ValueError(msg)
    merges = _merge_pairs()[: vocab_size - least]
    tokens = [*special_tokens, *_byte_alphabet(), *map("".join, merges)]
    tokenizer = _tokenizer(tokens, merges, special_tokens, add_bos=add_bos)
    names = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    config = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "special_tokens_map.json", names)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face's are: indented, UTF-8."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(stand_ins)) for b in range(_BYTES)]


def _merge_pairs() -> list[tuple[str, str]]:
    pairs = (pair.split(",") for pair in _MERGES.split())
    return [(left, right) for left, right in pairs]


def _tokenizer(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special_tokens: Sequence[str],
    *,
    add_bos: bool,
) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    bos = tokens.index("<bos>")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(special_tokens)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": _bos_template(bos) if add_bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _bos_template(token_id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {
            "<bos>": {"id": "<bos>", "ids": [token_id], "tokens": ["<bos>"]}
        },
    }
