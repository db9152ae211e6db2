"""Write tiny random Gemma 4 checkpoints, the same bits on every machine.

The two kinds of layers have different head dims (32 and 64), every norm and every
layer's scalar is off its neutral value, and a soft cap is low enough to bend the
logits: a swapped dimension or a forgotten term shows in them.
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

# Gemma 4's own: its tokenizer in MAX looks each of them up.
SPECIAL_TOKENS: Final = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|audio>",
    "<audio|>",
    "<|audio|>",
    "<|video|>",
)
TOKEN_IDS: Final = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
PAD, EOS, BOS = (TOKEN_IDS[token] for token in ("<pad>", "<eos>", "<bos>"))
VOCAB_SIZE: Final = 320

# Merges in order of priority, "Ġ" being a blank in GPT-2's byte alphabet. The first
# of them fill the vocabulary up.
_MERGES: Final = """
    Ġ,t h,e i,n r,e a,n e,r Ġ,a o,n Ġt,he o,r Ġ,s e,n a,t e,s Ġ,w i,t i,s Ġ,c o,u
    n,d in,g Ġ,o e,d Ġ,b Ġ,f Ġ,p a,r a,l Ġ,in Ġo,f Ġ,m Ġa,n Ġan,d a,s Ġt,o l,e r,o
    Ġ,h i,c Ġ,d s,t
"""

_CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role'])"
    " + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for item in message['content'] %}"
    "{{ item['text'] | trim if item['type'] == 'text' else '<|image|>' }}"
    "{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def write_tiny_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    wrapper: str = "model.language_model.",
    extra: Mapping[str, npt.NDArray[Any]] | None = None,
    unified: bool = False,
    **fields: Json,
) -> Path:
    """Write a random Gemma 4 in Hugging Face layout and return its directory.

    A tensor depends on the seed, its name and its shape alone.

    Args:
        directory: created where absent.
        seed: of the weights.
        wrapper: what the decoder's tensors are prefixed with.
        extra: further tensors, under full names.
        unified: name the architecture and model types of the 12B line.
        fields: as `tiny_config` takes them.
    """
    config = tiny_config(**fields)
    if unified:
        config["architectures"] = ["Gemma4UnifiedForConditionalGeneration"]
        config["model_type"] = "gemma4_unified"
        config["text_config"]["model_type"] = "gemma4_unified_text"
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name.replace("model.language_model.", wrapper): tensor
        for name, tensor in tiny_weights(config, seed).items()
    }
    save_file(
        {**weights, **(extra or {})}, directory / "model.safetensors", {"format": "pt"}
    )
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config())
    _write_json(directory / "tokenizer.json", _tokenizer())
    limit = config["text_config"]["max_position_embeddings"]
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(limit))
    _write_json(directory / "special_tokens_map.json", _special_tokens_map())
    return directory


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


# --- configuration ---------------------------------------------------------------


def tiny_config(
    *,
    num_layers: int = 6,
    layer_types: str | None = None,
    tie_word_embeddings: bool = True,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **text_fields: Json,
) -> dict[str, Any]:
    """Return a config.json with the fields Google's own checkpoints carry.

    Args:
        num_layers: `L`, where `layer_types` does not say.
        layer_types: a letter per layer, `s` for sliding and `f` for full attention;
            every sixth and the last are full by default.
        tie_word_embeddings: False adds an `lm_head.weight`.
        dtype: of every tensor; bfloat16 is float32 rounded to nearest even.
        text_fields: fields of the decoder's config to set or add.
    """
    if layer_types is None:
        kinds = ["f" if (i + 1) % 6 == 0 else "s" for i in range(num_layers - 1)]
        layer_types = "".join([*kinds, "f"])
    text: dict[str, Any] = {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": BOS,
        "dtype": dtype,
        "enable_moe_block": False,
        "eos_token_id": EOS,
        "final_logit_softcapping": 5.0,
        "global_head_dim": 64,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 96,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "layer_types": [
            "full_attention" if kind == "f" else "sliding_attention"
            for kind in layer_types
        ],
        "max_position_embeddings": 1024,
        "moe_intermediate_size": None,
        "num_attention_heads": 4,
        "num_experts": None,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": len(layer_types),
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "pad_token_id": PAD,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "sliding_window": 128,
        "tie_word_embeddings": tie_word_embeddings,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": None,
        "audio_token_id": TOKEN_IDS["<|audio|>"],
        "boa_token_id": TOKEN_IDS["<|audio>"],
        "boi_token_id": TOKEN_IDS["<|image>"],
        "dtype": dtype,
        "eoa_token_index": TOKEN_IDS["<audio|>"],
        "eoi_token_id": TOKEN_IDS["<image|>"],
        "eos_token_id": [EOS, TOKEN_IDS["<turn|>"]],
        "image_token_id": TOKEN_IDS["<|image|>"],
        "initializer_range": 0.02,
        "text_config": text | text_fields,
        "tie_word_embeddings": tie_word_embeddings,
        "video_token_id": TOKEN_IDS["<|video|>"],
        "vision_config": None,
    }


def _generation_config() -> dict[str, Any]:
    """Return a greedy default: no sampling fields for a server to pick up."""
    return {
        "bos_token_id": BOS,
        "do_sample": False,
        "eos_token_id": [EOS, TOKEN_IDS["<turn|>"]],
        "pad_token_id": PAD,
    }


# --- weights ---------------------------------------------------------------------


def tiny_weights(config: Mapping[str, Any], seed: int) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors a config asks for, under Hugging Face names."""
    maker = _Maker(seed)
    text = config["text_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    # Tied, the stream starts as the very row its own logit is measured with. A
    # start small beside what the layers add keeps greedy text from repeating it; the
    # final gain makes up for the small rows.
    embedding = 0.05 * maker.normal("embed_tokens", (vocab, hidden))
    tensors = {
        "model.language_model.embed_tokens.weight": embedding,
        "model.language_model.norm.weight": maker.norm("norm", hidden, mean=5.0),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 0.05 * maker.normal("lm_head", (vocab, hidden))
    for i in range(text["num_hidden_layers"]):
        tensors |= {
            f"model.language_model.layers.{i}.{name}": tensor
            for name, tensor in _layer(maker, text, i).items()
        }
    storage = BFLOAT16 if text["dtype"] == "bfloat16" else np.dtype(np.float32)
    return {
        name: tensor.astype(np.float32).astype(storage, copy=False)
        for name, tensor in tensors.items()
    }


def _layer(maker: _Maker, text: Mapping[str, Any], i: int) -> dict[str, Float64]:
    hidden, ffn = text["hidden_size"], text["intermediate_size"]
    full = text["layer_types"][i] == "full_attention"
    shared = full and text["attention_k_eq_v"]
    head_dim = text["global_head_dim"] if full else text["head_dim"]
    kv_heads = text["num_key_value_heads"]
    if shared:
        kv_heads = text["num_global_key_value_heads"]
    queries, keys = text["num_attention_heads"] * head_dim, kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    if shared:
        del shapes["self_attn.v_proj"]
    # Softer than neutral queries and keys: scores are not divided by a root here,
    # and attention that sees one token alone would say little of the others.
    norms = {"self_attn.q_norm": (head_dim, 0.6), "self_attn.k_norm": (head_dim, 0.6)}
    names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    norms |= {f"{name}_layernorm": (hidden, 1.0) for name in names}
    tensors = {
        f"{path}.weight": maker.projection(path, i, shape)
        for path, shape in shapes.items()
    }
    tensors["layer_scalar"] = 0.9 + 0.1 * maker.normal(f"scalar {i}", (1,))
    if text["enable_moe_block"]:
        experts, wide = text["num_experts"], text["moe_intermediate_size"]
        norms |= {
            f"{name}_2": (hidden, 1.0)
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        }
        norms |= {"post_feedforward_layernorm_1": (hidden, 1.0)}
        in_scale, out_scale = hidden**-0.5, wide**-0.5
        tensors |= {
            "router.proj.weight": maker.normal(f"router {i}", (experts, hidden)),
            "router.scale": maker.norm(f"router {i}", hidden, mean=1.0),
            "router.per_expert_scale": maker.norm(f"experts {i}", experts, mean=1.0),
            "experts.gate_up_proj": in_scale
            * maker.normal(f"gate_up {i}", (experts, 2 * wide, hidden)),
            "experts.down_proj": out_scale
            * maker.normal(f"down {i}", (experts, hidden, wide)),
        }
    tensors |= {
        f"{path}.weight": maker.norm(f"{i}.{path}", width, mean=mean)
        for path, (width, mean) in norms.items()
    }
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
        """Return a gain; Gemma 4 stores it as it is."""
        return mean + 0.25 * self.normal(f"norm {name}", (width,))

    def projection(self, path: str, i: int, shape: tuple[int, int]) -> Float64:
        """Return layer `i`'s matrix: a base all share, and a difference of its own.

        The difference has six well separated directions and a small full-rank
        rest, so that a low rank recovers most of it but never all.
        """
        out_features, in_features = shape
        matrix = self.normal(f"base {path} {shape}", shape)
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
    pairs = [(left, right) for left, right in (p.split(",") for p in _MERGES.split())]
    return pairs[: VOCAB_SIZE - 256 - len(SPECIAL_TOKENS)]


def _tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE tokenizer.json; as Gemma's, it puts <bos> in front."""
    tokens = [*SPECIAL_TOKENS, *_byte_alphabet(), *map("".join, _merge_pairs())]
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
        "post_processor": _bos_template(),
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
