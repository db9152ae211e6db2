"""Llama in numpy: the slow, independent reference of this package.

Written from the semantics of transformers' `modeling_llama.py`, with Hugging Face
tensor names. One sequence at a time, float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def forward(
    weights: Mapping[str, Array], config: Mapping[str, Any], tokens: Sequence[int]
) -> Array:
    """Return logits `[tokens, vocabulary]` of one sequence."""

    def weight(name: str) -> Array:
        return weights[name].astype(np.float64)

    eps = config["rms_norm_eps"]
    embedding = weight("model.embed_tokens.weight")
    x = embedding[list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name: weight(f"model.layers.{layer}.{name}.weight")
            for name in (
                *(f"self_attn.{part}_proj" for part in "qkvo"),
                *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
                "input_layernorm",
                "post_attention_layernorm",
            )
        }
        x = x + _attention(_norm(x, own["input_layernorm"], eps), own, config)
        x = x + _mlp(_norm(x, own["post_attention_layernorm"], eps), own)
    x = _norm(x, weight("model.norm.weight"), eps)
    head = embedding if config["tie_word_embeddings"] else weight("lm_head.weight")
    return np.asarray(x @ head.T)


def _norm(x: Array, gain: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain)


def _mlp(x: Array, own: Mapping[str, Array]) -> Array:
    gate = x @ own["mlp.gate_proj"].T
    wide = gate / (1.0 + np.exp(-gate)) * (x @ own["mlp.up_proj"].T)
    return np.asarray(wide @ own["mlp.down_proj"].T)


def _attention(x: Array, own: Mapping[str, Array], config: Mapping[str, Any]) -> Array:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    count = len(x)
    q, k, v = (
        (x @ own[f"self_attn.{part}_proj"].T).reshape(count, -1, head_dim)
        for part in "qkv"
    )
    frequencies = _frequencies(config, head_dim)
    q, k = _rotate(q, frequencies), _rotate(k, frequencies)
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(count, -1)
    return np.asarray(mixed @ own["self_attn.o_proj"].T)


def _frequencies(config: Mapping[str, Any], head_dim: int) -> Array:
    """Return the angle of each pair of dimensions per position, `[head_dim / 2]`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    found = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.get("rope_type", "default") == "default":
        return np.asarray(found)
    # Llama 3: long waves are stretched, short ones left alone, and between blended.
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = (original * found / (2 * math.pi) - low) / (high - low)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray(found * (blend + (1 - blend) / factor))


def _rotate(x: Array, frequencies: Array) -> Array:
    """Turn the first half of each head against the second, by position."""
    angles = np.arange(len(x))[:, None, None] * frequencies
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
