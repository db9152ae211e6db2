"""Gemma 4 (text) in numpy: the slow, independent reference of this package.

Written from the semantics of transformers' `modeling_gemma4.py`, with Hugging Face
tensor names. It shares no code with the package under test. One sequence at a time,
no batching.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnquant.testing.numpy_layers import (
    causal_mask,
    gelu_tanh,
    mean_svd_weff,
    rotate,
    softcap,
    softmax,
    split_heads,
)

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]
Config = Mapping[str, Any]

MODEL: Final = "model.language_model"
_ATTN_FAMILIES: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_FAMILIES: Final = ("gate_proj", "up_proj", "down_proj")


# --- configuration ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the layers of one kind have in common; no window means all tokens."""

    head_dim: int
    num_kv_heads: int
    keys_are_values: bool
    theta: float
    rotated: float
    window: int | None


@dataclass(frozen=True, slots=True)
class _Model:
    """What the forward needs of a config.json."""

    hidden_size: int
    num_heads: int
    eps: float
    layer_types: tuple[str, ...]
    kinds: Mapping[str, _Kind]
    softcap: float | None
    tied: bool
    top_k: int | None

    @classmethod
    def read(cls, config: Config) -> _Model:
        text = config["text_config"]
        rope = text["rope_parameters"]
        shared = text["attention_k_eq_v"]
        kinds = {
            "sliding_attention": _Kind(
                head_dim=text["head_dim"],
                num_kv_heads=text["num_key_value_heads"],
                keys_are_values=False,
                theta=rope["sliding_attention"]["rope_theta"],
                rotated=1.0,
                window=text["sliding_window"],
            ),
            "full_attention": _Kind(
                head_dim=text["global_head_dim"],
                num_kv_heads=text[
                    "num_global_key_value_heads" if shared else "num_key_value_heads"
                ],
                keys_are_values=shared,
                theta=rope["full_attention"]["rope_theta"],
                rotated=rope["full_attention"]["partial_rotary_factor"],
                window=None,
            ),
        }
        return cls(
            hidden_size=text["hidden_size"],
            num_heads=text["num_attention_heads"],
            eps=text["rms_norm_eps"],
            layer_types=tuple(text["layer_types"]),
            kinds=kinds,
            softcap=text["final_logit_softcapping"],
            tied=config["tie_word_embeddings"],
            top_k=text["top_k_experts"] if text["enable_moe_block"] else None,
        )


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
        config: the checkpoint's config.json.
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
            name: _rotation(kind, start, self._seen, self._dtype)
            for name, kind in model.kinds.items()
        }
        masks = {
            name: causal_mask(start, self._seen, kind.window)
            for name, kind in model.kinds.items()
        }
        rows = self._weights[f"{MODEL}.embed_tokens.weight"][tokens]
        x = rows.astype(self._dtype) * self._dtype.type(math.sqrt(model.hidden_size))
        for i, name in enumerate(model.layer_types):
            x = self._block(x, i, rotations[name], masks[name])
        return np.asarray(x)

    def logits(self, hidden: Array) -> Array:
        """Return the final norm and head: `[T, hidden]` to `[T, vocab]`."""
        x = self._norm(hidden, f"{MODEL}.norm")
        name = f"{MODEL}.embed_tokens" if self._model.tied else "lm_head"
        return softcap(self._linear(x, name), self._model.softcap)

    def _block(
        self, x: Array, i: int, rotation: tuple[Array, Array], mask: Array
    ) -> Array:
        """One decoder layer: each half is normed on its way in and out."""
        layer = f"{MODEL}.layers.{i}"
        h = self._norm(x, f"{layer}.input_layernorm")
        h = self._attention(h, i, rotation, mask)
        x = x + self._norm(h, f"{layer}.post_attention_layernorm")
        h = self._norm(x, f"{layer}.pre_feedforward_layernorm")
        h = self._mlp(h, f"{layer}.mlp")
        if self._model.top_k is not None:
            h = self._norm(h, f"{layer}.post_feedforward_layernorm_1")
            routed = self._experts(x, layer, self._model.top_k)
            h = h + self._norm(routed, f"{layer}.post_feedforward_layernorm_2")
        x = x + self._norm(h, f"{layer}.post_feedforward_layernorm")
        return np.asarray(x * self._widen(f"{layer}.layer_scalar"))

    def _attention(
        self, x: Array, i: int, rotation: tuple[Array, Array], mask: Array
    ) -> Array:
        """Grouped-query attention, `[T, hidden]`; queries, keys, values are normed."""
        model, attn = self._model, f"{MODEL}.layers.{i}.self_attn"
        kind = model.kinds[model.layer_types[i]]
        q = split_heads(self._linear(x, f"{attn}.q_proj"), model.num_heads)
        k = split_heads(self._linear(x, f"{attn}.k_proj"), kind.num_kv_heads)
        v = k
        if not kind.keys_are_values:
            v = split_heads(self._linear(x, f"{attn}.v_proj"), kind.num_kv_heads)
        q = rotate(self._norm(q, f"{attn}.q_norm"), rotation)
        k = rotate(self._norm(k, f"{attn}.k_norm"), rotation)
        v = self._unit(v)
        if (past := self._cache[i]) is not None:
            k = np.concatenate([past[0], k], axis=1)
            v = np.concatenate([past[1], v], axis=1)
        self._cache[i] = (k, v)
        # Head h reads KV head h // group, so heads split as [kv, group]. Scores are
        # not scaled.
        q = q.reshape(kind.num_kv_heads, -1, *q.shape[1:])
        scores = q @ k[:, None].swapaxes(-1, -2)
        scores[..., ~mask] = -np.inf
        heads = softmax(scores) @ v[:, None]
        # [kv, group, T, head dim] -> [T, heads x head dim]
        merged = heads.transpose(2, 0, 1, 3).reshape(len(x), -1)
        return self._linear(merged, f"{attn}.o_proj")

    def _mlp(self, x: Array, mlp: str) -> Array:
        gate = gelu_tanh(self._linear(x, f"{mlp}.gate_proj"))
        return self._linear(
            gate * self._linear(x, f"{mlp}.up_proj"), f"{mlp}.down_proj"
        )

    def _experts(self, x: Array, layer: str, top_k: int) -> Array:
        """The chosen experts' outputs, weighted: `[T, hidden]`."""
        router = f"{layer}.router"
        scaled = self._unit(x) * self._widen(f"{router}.scale")
        scaled = scaled * self._dtype.type(self._model.hidden_size**-0.5)
        shares = softmax(self._linear(scaled, f"{router}.proj"))
        x = self._norm(x, f"{layer}.pre_feedforward_layernorm_2")
        per_expert = self._widen(f"{router}.per_expert_scale")
        gate_up = self._widen(f"{layer}.experts.gate_up_proj")
        down = self._widen(f"{layer}.experts.down_proj")
        out = np.zeros_like(x)
        for token, share in enumerate(shares):
            chosen = np.argsort(-share, kind="stable")[:top_k]
            total = share[chosen].sum()
            for expert in chosen:
                gate, up = np.split(gate_up[expert] @ x[token], 2)
                inner = down[expert] @ (gelu_tanh(gate) * up)
                out[token] += inner * (share[expert] / total) * per_expert[expert]
        return out

    def _linear(self, x: Array, name: str) -> Array:
        """`y = x Wᵀ`, with `W [out, in]`."""
        return np.asarray(x @ self._widen(f"{name}.weight").T)

    def _norm(self, x: Array, name: str) -> Array:
        """RMS norm over the last axis; Gemma 4 stores the gain as it is."""
        return np.asarray(self._unit(x) * self._widen(f"{name}.weight"))

    def _unit(self, x: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self._dtype.type(self._model.eps)))

    def _widen(self, name: str) -> Array:
        return self._weights[name].astype(self._dtype, copy=False)


# --- pieces ----------------------------------------------------------------------


def _rotation(
    kind: _Kind, start: int, stop: int, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return cos and sin `[stop - start, head_dim / 2]` of the positions.

    `angle[p, j] = p * theta ** (-2 j / head_dim)`, and 0 for the lanes beyond the
    part that is rotated; in float64 whatever the dtype.
    """
    lanes = kind.head_dim // 2
    frequency = kind.theta ** (-2.0 * np.arange(lanes) / kind.head_dim)
    frequency[int(kind.rotated * kind.head_dim // 2) :] = 0.0
    angle = np.arange(start, stop, dtype=np.float64)[:, None] * frequency
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


# --- the decomposition's plain method, for references at G < L -------------------


def sharers(config: Config, family: str, blocks: int) -> list[list[int]]:
    """Return the layers of each base of a family, where the layers have it.

    Layer `i` of `L` belongs to band `i * G // L`. Within a band, attention layers of
    different kinds share nothing; with keys for values, full layers have no `v_proj`.
    """
    text = config["text_config"]
    bases: dict[tuple[int, str], list[int]] = {}
    for i, kind in enumerate(text["layer_types"]):
        full = kind == "full_attention"
        if family == "v_proj" and full and text["attention_k_eq_v"]:
            continue
        group = kind if family in _ATTN_FAMILIES else ""
        band = i * blocks // len(text["layer_types"])
        bases.setdefault((band, group), []).append(i)
    return list(bases.values())


def substitute_weff(
    weights: Weights,
    config: Config,
    rank: int,
    blocks: int,
    families: Literal["all", "attn"],
) -> dict[str, Array]:
    """Return the weights with each tied projection replaced by its float32 `W_eff`.

    The other tensors are the same objects as in `weights`, in their own dtypes.
    """
    out = dict(weights)
    modules = {"self_attn": _ATTN_FAMILIES}
    if families == "all":
        modules["mlp"] = _MLP_FAMILIES
    for module, names in modules.items():
        for family in names:
            for layers in sharers(config, family, blocks):
                full = [f"{MODEL}.layers.{i}.{module}.{family}.weight" for i in layers]
                effective = mean_svd_weff([weights[name] for name in full], rank)
                out |= {
                    name: matrix.astype(np.float32)
                    for name, matrix in zip(full, effective, strict=True)
                }
    return out
