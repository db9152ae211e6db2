"""Write tiny random Gemma 4 checkpoints, the same bits on every machine.

The two kinds of layers have different head dims (32 and 64), every norm and every
layer's scalar is off its neutral value, and a soft cap is low enough to bend the
logits: a swapped dimension or a forgotten term shows in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from attnquant.testing.checkpoints import BFLOAT16
from attnquant.testing.random_tensors import Float64, TensorMaker
from attnquant.testing.tokenizer import write_json, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", _generation_config())
    write_tokenizer(
        directory,
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        # As Gemma 4's does.
        add_bos=True,
        chat_template=_CHAT_TEMPLATE,
        max_length=config["text_config"]["max_position_embeddings"],
    )
    return directory


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
    maker = TensorMaker(seed)
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


def _layer(maker: TensorMaker, text: Mapping[str, Any], i: int) -> dict[str, Float64]:
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
        f"{path}.weight": maker.projection(path, i, shape, base=f"{path} {shape}")
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
