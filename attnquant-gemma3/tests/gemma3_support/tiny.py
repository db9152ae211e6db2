"""Write tiny random Gemma 3 checkpoints, the same bits on every machine.

No dimension equals another (hidden 96, query heads 128, KV heads 64, FFN 160,
vocabulary 320), the score scale is not the head dim's and every norm is off its
neutral value: a swapped dimension or a forgotten term shows in the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from attnquant.testing import tokenizer
from attnquant.testing.checkpoints import BFLOAT16
from attnquant.testing.random_tensors import Float64, TensorMaker
from attnquant.testing.tokenizer import write_json, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# A value of a config.json.
Json = Any

SPECIAL_TOKENS: Final = (*tokenizer.SPECIAL_TOKENS, "<start_of_turn>", "<end_of_turn>")
PAD, EOS, BOS, UNK, START_OF_TURN, END_OF_TURN = range(len(SPECIAL_TOKENS))

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
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        tiny_weights(config, seed), directory / "model.safetensors", {"format": "pt"}
    )
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", _generation_config())
    write_tokenizer(
        directory,
        vocab_size=config["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        add_bos=add_bos,
        chat_template=_CHAT_TEMPLATE,
        max_length=config["max_position_embeddings"],
    )
    return directory


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
    maker = TensorMaker(seed)
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


def _layer(maker: TensorMaker, config: Mapping[str, Any], i: int) -> dict[str, Float64]:
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
