"""Gemma 3 (text) in numpy: the slow, independent reference of this package.

Written from the Gemma 3 report (arXiv 2503.19786) and the semantics of
transformers' `modeling_gemma3.py`, with Hugging Face tensor names. It shares no
code with the package under test. One sequence at a time, no batching.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnquant.testing.numpy_layers import (
    causal_mask,
    gelu_tanh,
    mean_svd_weff,
    rotate,
    silu,
    softcap,
    softmax,
    split_heads,
)

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]
Config = Mapping[str, Any]
LayerType = Literal["sliding_attention", "full_attention"]

# Wide enough for a fast matmul, narrow enough that widening a bfloat16
# vocabulary of 262144 never holds more than a small slice of it.
_HEAD_ROWS: Final = 32768

_ATTN_FAMILIES: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_FAMILIES: Final = ("gate_proj", "up_proj", "down_proj")


# --- configuration ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rope:
    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class _Model:
    """What the forward needs of a config.json, old style or new."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: Callable[[Array], Array]
    layer_types: tuple[LayerType, ...]
    window: int | None
    ropes: Mapping[str, _Rope]
    attn_softcap: float | None
    final_softcap: float | None
    tied: bool

    @classmethod
    def read(cls, config: Config) -> _Model:
        """Read a text config, or the text part of a multimodal one."""
        text = config.get("text_config", config)
        if text.get("use_bidirectional_attention"):
            msg = "use_bidirectional_attention is not part of this oracle"
            raise ValueError(msg)
        return cls(
            hidden_size=text["hidden_size"],
            num_heads=text["num_attention_heads"],
            num_kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            eps=text.get("rms_norm_eps", 1e-6),
            scale=text.get("query_pre_attn_scalar", 256) ** -0.5,
            activation=_activation(text.get("hidden_activation")),
            layer_types=_layer_types(text),
            window=text.get("sliding_window", 4096),
            ropes=_ropes(text),
            attn_softcap=text.get("attn_logit_softcapping"),
            final_softcap=text.get("final_logit_softcapping"),
            tied=text.get("tie_word_embeddings", True),
        )


def _layer_types(text: Config) -> tuple[LayerType, ...]:
    """Per layer its attention: listed, or every `pattern`-th one full."""
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
    return tuple(
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(text["num_hidden_layers"])
    )


def _ropes(text: Config) -> dict[str, _Rope]:
    """RoPE per layer type, from transformers 5's fields or from 4's.

    In the old style `rope_scaling` belongs to the full-attention layers alone.
    """
    new = text.get("rope_parameters") or {}
    sliding = new.get("sliding_attention") or {}
    full = new.get("full_attention") or text.get("rope_scaling") or {}
    return {
        "sliding_attention": _rope(sliding, text.get("rope_local_base_freq", 10_000.0)),
        "full_attention": _rope(full, text.get("rope_theta", 1_000_000.0)),
    }


def _rope(parameters: Config, theta: float) -> _Rope:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in {"default", "linear"}:
        msg = f"rope type {kind!r}: this oracle knows 'default' and 'linear'"
        raise ValueError(msg)
    factor = parameters["factor"] if kind == "linear" else 1.0
    return _Rope(theta=parameters.get("rope_theta", theta), factor=factor)


def _gelu_erf(x: Array) -> Array:
    # numpy has no erf; slow, and no released Gemma 3 asks for it.
    erf = np.vectorize(math.erf, otypes=[x.dtype])
    return np.asarray(0.5 * x * (1.0 + erf(x / math.sqrt(2.0))))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _activation(name: str | None) -> Callable[[Array], Array]:
    """Return the gate's activation; transformers' default is the tanh GELU."""
    known = {
        "gelu_pytorch_tanh": gelu_tanh,
        "gelu_tanh": gelu_tanh,
        "gelu": _gelu_erf,
        "silu": silu,
        "swish": silu,
        "relu": _relu,
    }
    return known[name or "gelu_pytorch_tanh"]


# --- the model, top-down ---------------------------------------------------------


def forward(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    *,
    dtype: npt.DTypeLike = np.float64,
    positions: Literal["all", "last"] = "all",
) -> Array:
    """Return the logits of one sequence.

    Args:
        weights: tensors under their Hugging Face names, of any float dtype
            (ml_dtypes' included); each is widened to `dtype` only while in use.
        config: the checkpoint's config.json, of transformers 4 or 5.
        tokens: `T` token ids, exactly as they are fed: nothing is prepended.
        dtype: the dtype of all arithmetic and of the result.
        positions: "all" for every position, "last" for the last one alone.

    Returns:
        Logits `[T, vocab]`, or `[1, vocab]` for "last".
    """
    net = _Net(weights, _Model.read(config), np.dtype(dtype))
    hidden = net.hidden(np.asarray(tokens, dtype=np.int64))
    return net.logits(hidden if positions == "all" else hidden[-1:])


def greedy(
    weights: Weights,
    config: Config,
    prompt_tokens: Sequence[int],
    steps: int,
    dtype: npt.DTypeLike = np.float64,
) -> list[int]:
    """Return `steps` greedy tokens; end-of-sequence tokens do not stop it."""
    net = _Net(weights, _Model.read(config), np.dtype(dtype))
    pending = np.asarray(prompt_tokens, dtype=np.int64)
    out: list[int] = []
    for _ in range(steps):
        logits = net.logits(net.hidden(pending)[-1:])
        out.append(int(np.argmax(logits[0])))
        pending = np.asarray(out[-1:], dtype=np.int64)
    return out


class _Net:
    """The decoder around one growing KV cache."""

    def __init__(self, weights: Weights, model: _Model, dtype: np.dtype[Any]) -> None:
        self._weights = weights
        self._model = model
        self._dtype = dtype
        self._seen = 0
        # Per layer keys (rotated) and values, each [kv heads, tokens seen, head dim].
        # Sliding layers keep all of it too: the mask alone forgets.
        self._cache: list[tuple[Array, Array] | None] = [None] * len(model.layer_types)

    def hidden(self, tokens: Array) -> Array:
        """Feed tokens `[T]`; return the last block's output `[T, hidden]`."""
        model = self._model
        start, self._seen = self._seen, self._seen + len(tokens)
        rotations = {
            kind: _rotation(rope, model.head_dim, start, self._seen, self._dtype)
            for kind, rope in model.ropes.items()
        }
        masks = {
            "full_attention": causal_mask(start, self._seen, None),
            "sliding_attention": causal_mask(start, self._seen, model.window),
        }
        rows = self._weights["model.embed_tokens.weight"][tokens]
        # The scale keeps float precision; transformers rounds it only where the
        # whole model runs in a narrower dtype.
        x = rows.astype(self._dtype) * self._dtype.type(math.sqrt(model.hidden_size))
        for i, kind in enumerate(model.layer_types):
            x = self._block(x, i, rotations[kind], masks[kind])
        return np.asarray(x)

    def logits(self, hidden: Array) -> Array:
        """Return the final norm and head: `[T, hidden]` to `[T, vocab]`."""
        x = self._norm(hidden, "model.norm")
        tied = self._model.tied or "lm_head.weight" not in self._weights
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        head = self._weights[name]
        out = np.empty((len(x), len(head)), dtype=self._dtype)
        for rows in _row_blocks(len(head)):
            np.matmul(x, head[rows].astype(self._dtype, copy=False).T, out=out[:, rows])
        return softcap(out, self._model.final_softcap)

    def _block(
        self, x: Array, i: int, rotation: tuple[Array, Array], mask: Array
    ) -> Array:
        """One decoder layer: each half is normed on its way in and out."""
        layer = f"model.layers.{i}"
        h = self._norm(x, f"{layer}.input_layernorm")
        h = self._attention(h, i, rotation, mask)
        x = x + self._norm(h, f"{layer}.post_attention_layernorm")
        h = self._norm(x, f"{layer}.pre_feedforward_layernorm")
        h = self._mlp(h, f"{layer}.mlp")
        return np.asarray(x + self._norm(h, f"{layer}.post_feedforward_layernorm"))

    def _attention(
        self, x: Array, i: int, rotation: tuple[Array, Array], mask: Array
    ) -> Array:
        """Grouped-query attention with normed queries and keys, `[T, hidden]`."""
        model, attn = self._model, f"model.layers.{i}.self_attn"
        q = split_heads(self._linear(x, f"{attn}.q_proj"), model.num_heads)
        k = split_heads(self._linear(x, f"{attn}.k_proj"), model.num_kv_heads)
        v = split_heads(self._linear(x, f"{attn}.v_proj"), model.num_kv_heads)
        q = rotate(self._norm(q, f"{attn}.q_norm"), rotation)
        k = rotate(self._norm(k, f"{attn}.k_norm"), rotation)
        if (past := self._cache[i]) is not None:
            k = np.concatenate([past[0], k], axis=1)
            v = np.concatenate([past[1], v], axis=1)
        self._cache[i] = (k, v)
        # Head h reads KV head h // group, so heads split as [kv, group].
        q = q.reshape(model.num_kv_heads, -1, *q.shape[1:])
        scores = q @ k[:, None].swapaxes(-1, -2)
        scores *= self._dtype.type(model.scale)
        scores = softcap(scores, model.attn_softcap)
        scores[..., ~mask] = -np.inf
        heads = softmax(scores) @ v[:, None]
        # [kv, group, T, head dim] -> [T, heads x head dim]
        merged = heads.transpose(2, 0, 1, 3).reshape(len(x), -1)
        return self._linear(merged, f"{attn}.o_proj")

    def _mlp(self, x: Array, mlp: str) -> Array:
        gate = self._model.activation(self._linear(x, f"{mlp}.gate_proj"))
        return self._linear(
            gate * self._linear(x, f"{mlp}.up_proj"), f"{mlp}.down_proj"
        )

    def _linear(self, x: Array, name: str) -> Array:
        """`y = x Wᵀ (+ b)`, with `W [out, in]`."""
        y = x @ self._widen(f"{name}.weight").T
        if f"{name}.bias" in self._weights:
            y = y + self._widen(f"{name}.bias")
        return np.asarray(y)

    def _norm(self, x: Array, name: str) -> Array:
        """RMS norm over the last axis; Gemma stores the gain minus one."""
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed = x / np.sqrt(mean_square + self._dtype.type(self._model.eps))
        return np.asarray(normed * (1.0 + self._widen(f"{name}.weight")))

    def _widen(self, name: str) -> Array:
        return self._weights[name].astype(self._dtype, copy=False)


# --- pieces ----------------------------------------------------------------------


def _rotation(
    rope: _Rope, head_dim: int, start: int, stop: int, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return cos and sin `[stop - start, head_dim / 2]` of the positions.

    `angle[p, j] = (p / factor) * theta ** (-2 j / head_dim)`, in float64 whatever
    the dtype: a float32 angle of position 1000 is off by 6e-5 already.
    """
    frequency = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    position = np.arange(start, stop, dtype=np.float64) / rope.factor
    angle = position[:, None] * frequency
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def _row_blocks(rows: int) -> Iterator[slice]:
    for first in range(0, rows, _HEAD_ROWS):
        yield slice(first, min(first + _HEAD_ROWS, rows))


# --- the decomposition's plain method, for references at G < L -------------------


def substitute_weff(
    weights: Weights, rank: int, blocks: int, families: Literal["all", "attn"]
) -> dict[str, Array]:
    """Return the weights with each tied projection replaced by its float32 `W_eff`.

    Layer `i` of `L` belongs to band `i * G // L`, whose layers share a base. The other
    tensors are the same objects as in `weights`, in their own dtypes.
    """
    out = dict(weights)
    paths = [f"self_attn.{family}" for family in _ATTN_FAMILIES]
    if families == "all":
        paths += [f"mlp.{family}" for family in _MLP_FAMILIES]
    for path in paths:
        names = _layer_names(weights, path)
        bands = [i * blocks // len(names) for i in range(len(names))]
        for band in range(blocks):
            sharers = [n for n, b in zip(names, bands, strict=True) if b == band]
            effective = mean_svd_weff([weights[n] for n in sharers], rank)
            out |= {
                n: w.astype(np.float32) for n, w in zip(sharers, effective, strict=True)
            }
    return out


def _layer_names(weights: Weights, path: str) -> list[str]:
    names: list[str] = []
    while (name := f"model.layers.{len(names)}.{path}.weight") in weights:
        names.append(name)
    return names
