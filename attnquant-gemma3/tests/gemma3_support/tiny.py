"""Write tiny random Gemma 3 checkpoints, the same bits on every machine.

No dimension equals another (hidden 96, query heads 128, KV heads 64, FFN 160,
vocabulary 320), the score scale is not the head dim's and every norm is off its
neutral value: a swapped dimension or a forgotten term shows in the logits.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from attnquant.testing.checkpoints import BFLOAT16

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Float64 = npt.NDArray[np.float64]
# A value of a config.json.
Json = Any

SPECIAL_TOKENS: Final = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
)
PAD, EOS, BOS, UNK, START_OF_TURN, END_OF_TURN = range(len(SPECIAL_TOKENS))

# Merges in order of priority, "Ġ" being a blank in GPT-2's byte alphabet. 58 of
# them fill the vocabulary up to 320.
_MERGES: Final = """
    Ġ,t h,e i,n r,e a,n e,r Ġ,a o,n Ġt,he o,r Ġ,s e,n a,t e,s Ġ,w i,t i,s Ġ,c o,u
    n,d in,g Ġ,o e,d Ġ,b Ġ,f Ġ,p a,r a,l Ġ,in Ġo,f Ġ,m Ġa,n Ġan,d a,s Ġt,o l,e r,o
    Ġ,h i,c Ġ,d s,t i,on l,l o,m v,e en,t Ġ,l c,h Ġ,n u,t Ġ,e o,w Ġ,g Ġ,re t,er a,d
    r,i h,a
"""

_CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant'"
    " else message['role']) + '\n' + message['content'] | trim"
    " + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def write_tiny_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    num_layers: int = 8,
    tie_word_embeddings: bool = True,
    sliding_window: int = 128,
    dtype: Literal["float32", "bfloat16"] = "float32",
    add_bos: bool = False,
    **config_overrides: Json,
) -> Path:
    """Write a random Gemma 3 in Hugging Face layout and return its directory.

    A tensor depends on the seed, its name and its shape alone: a model with more
    layers begins with the layers of one with fewer.

    Args:
        directory: created where absent.
        seed: of the weights.
        num_layers: `L`; every sixth layer has full attention.
        tie_word_embeddings: False adds an `lm_head.weight`.
        sliding_window: at least 128 where MAX on CPU is to compile the model.
        dtype: of every tensor; bfloat16 is float32 rounded to nearest even.
        add_bos: the tokenizer puts <bos> in front of a text, as Gemma's does. It is
            off so that `decode(encode(text)) == text` needs no condition.
        config_overrides: config.json fields to set or add; None stays null. With
            `rope_parameters` (transformers 5) the old RoPE fields are left out.

    Raises:
        ValueError: a `vocab_size` below that of the tokenizer.
    """
    config = tiny_config(
        num_layers=num_layers,
        tie_word_embeddings=tie_word_embeddings,
        sliding_window=sliding_window,
        dtype=dtype,
        **config_overrides,
    )
    vocabulary = _vocabulary()
    if config["vocab_size"] < len(vocabulary):
        msg = f"vocab_size {config['vocab_size']} < {len(vocabulary)} of the tokenizer"
        raise ValueError(msg)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        tiny_weights(config, seed), directory / "model.safetensors", {"format": "pt"}
    )
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config())
    _write_json(directory / "tokenizer.json", _tokenizer(vocabulary, add_bos=add_bos))
    limit = config["max_position_embeddings"]
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(limit))
    _write_json(directory / "special_tokens_map.json", _special_tokens_map())
    return directory


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


# --- configuration ---------------------------------------------------------------


def tiny_config(
    *,
    num_layers: int = 8,
    tie_word_embeddings: bool = True,
    sliding_window: int = 128,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **config_overrides: Json,
) -> dict[str, Any]:
    """Return a config.json with the fields Google's own checkpoints carry.

    The arguments are those of `write_tiny_checkpoint`. `_sliding_window_pattern` is
    what MAX reads and `layer_types` what transformers reads; both follow from
    `sliding_window_pattern`, unless they are overridden.
    """
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": BOS,
        "dtype": dtype,
        "eos_token_id": EOS,
        "final_logit_softcapping": None,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 96,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "max_position_embeddings": 1024,
        "num_attention_heads": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 2,
        "pad_token_id": PAD,
        "query_pre_attn_scalar": 24,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": None,
        "rope_theta": 1_000_000.0,
        "sliding_window": sliding_window,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": tie_word_embeddings,
        "use_cache": True,
        "vocab_size": 320,
    }
    config |= config_overrides
    if "rope_parameters" in config:
        for old in ("rope_local_base_freq", "rope_scaling", "rope_theta"):
            config.pop(old)
    pattern = config["sliding_window_pattern"]
    config.setdefault("_sliding_window_pattern", pattern)
    config.setdefault(
        "layer_types",
        [
            "sliding_attention" if (i + 1) % pattern else "full_attention"
            for i in range(config["num_hidden_layers"])
        ],
    )
    return config


def _generation_config() -> dict[str, Any]:
    """Return a greedy default: no sampling fields for a server to pick up."""
    return {
        "bos_token_id": BOS,
        "do_sample": False,
        "eos_token_id": [EOS, END_OF_TURN],
        "pad_token_id": PAD,
    }


# --- weights ---------------------------------------------------------------------


def tiny_weights(config: Mapping[str, Any], seed: int) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors a config asks for, under Hugging Face names."""
    maker = _Maker(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # Tied, the stream starts as the very row its own logit is measured with. A
    # start small beside what the layers add keeps greedy text from repeating it; the
    # final gain makes up for the small rows.
    embedding = 0.05 * maker.normal("embed_tokens", (vocab, hidden))
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": maker.norm("norm", hidden, mean=4.0),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 0.05 * maker.normal("lm_head", (vocab, hidden))
    for i in range(config["num_hidden_layers"]):
        tensors |= _layer(maker, config, i)
    storage = BFLOAT16 if config["dtype"] == "bfloat16" else np.dtype(np.float32)
    return {
        name: tensor.astype(np.float32).astype(storage, copy=False)
        for name, tensor in tensors.items()
    }


def _layer(maker: _Maker, config: Mapping[str, Any], i: int) -> dict[str, Float64]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "pre_feedforward_layernorm": hidden,
        "post_feedforward_layernorm": hidden,
        "self_attn.q_norm": config["head_dim"],
        "self_attn.k_norm": config["head_dim"],
    }
    layer = f"model.layers.{i}"
    tensors = {
        f"{layer}.{path}.weight": maker.projection(path, i, shape)
        for path, shape in shapes.items()
    }
    for path, width in norms.items():
        # Sharper than neutral queries and keys, so that attention picks and the
        # logits depend on which tokens are seen.
        mean = 0.4 if path.endswith(("q_norm", "k_norm")) else 0.0
        tensors[f"{layer}.{path}.weight"] = maker.norm(f"{i}.{path}", width, mean=mean)
    return tensors


class _Maker:
    """Random tensors by elementwise arithmetic that IEEE 754 fixes to the bit.

    `numpy.random.Generator` may change its streams between releases (NEP 19) and
    BLAS sums in an order of its own; raw PCG64 words and ufuncs do neither.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, shape: tuple[int, ...]) -> Float64:
        """Return values near N(0, 1): four uniform 16-bit parts summed, scaled."""
        sequence = np.random.SeedSequence([self._seed, zlib.crc32(name.encode())])
        words = np.random.PCG64(sequence).random_raw(math.prod(shape))
        parts = words.astype("<u8").view("<u2").reshape(-1, 4).astype(np.int64)
        centred = 2 * parts.sum(axis=1) - 4 * 65535
        # A uniform 16-bit integer has the variance (2**32 - 1) / 12.
        deviation = 2.0 * math.sqrt(4 * (2**32 - 1) / 12)
        return np.asarray(centred.reshape(shape) / deviation)

    def norm(self, name: str, width: int, *, mean: float) -> Float64:
        """Return a stored norm weight, the gain minus one."""
        return mean + 0.25 * self.normal(f"norm {name}", (width,))

    def projection(self, path: str, i: int, shape: tuple[int, int]) -> Float64:
        """Return layer `i`'s matrix: a base all share, and a difference of its own.

        The difference has six well separated directions and a small full-rank
        rest, so that a low rank recovers most of it but never all.
        """
        out_features, in_features = shape
        matrix = self.normal(f"base {path}", shape)
        for k in range(6):
            u = self.normal(f"u{k} {path} {i}", (out_features, 1))
            v = self.normal(f"v{k} {path} {i}", (1, in_features))
            matrix += (0.4 * 0.75**k) * (u * v)
        matrix += 0.1 * self.normal(f"rest {path} {i}", shape)
        return matrix / math.sqrt(in_features)


# --- tokenizer -------------------------------------------------------------------


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(stand_ins)) for b in range(256)]


def _merge_pairs() -> list[tuple[str, str]]:
    pairs = (pair.split(",") for pair in _MERGES.split())
    return [(left, right) for left, right in pairs]


def _vocabulary() -> dict[str, int]:
    tokens = [*SPECIAL_TOKENS, *_byte_alphabet(), *map("".join, _merge_pairs())]
    return {token: i for i, token in enumerate(tokens)}


def _tokenizer(vocabulary: Mapping[str, int], *, add_bos: bool) -> dict[str, Any]:
    """Return a byte-level BPE tokenizer.json."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
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
            for i, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": _bos_template() if add_bos else None,
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
            "vocab": dict(vocabulary),
            "merges": [list(pair) for pair in _merge_pairs()],
        },
    }


def _bos_template() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }


def _special_tokens_map() -> dict[str, Any]:
    return {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }


def _tokenizer_config(limit: int) -> dict[str, Any]:
    return {
        **_special_tokens_map(),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": limit,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
