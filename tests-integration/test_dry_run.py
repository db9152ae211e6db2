"""A dry run on a checkpoint too large for any test machine: headers are enough."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
LAYERS, HIDDEN, WIDE = 60, 5376, 21504
HEADS, KV_HEADS, HEAD_DIM = 32, 16, 256
GLOBAL_KV_HEADS, GLOBAL_HEAD_DIM = 4, 512
VOCABULARY = 262144


def is_full(layer: int) -> bool:
    return layer % 6 == 5


def config() -> dict[str, object]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": WIDE,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "layer_types": [kinds[is_full(layer)] for layer in range(LAYERS)],
        },
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the decoder's tensors of a dense Gemma 4 of about 31B parameters."""
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        head = GLOBAL_HEAD_DIM if is_full(layer) else HEAD_DIM
        kv_dim = head * (GLOBAL_KV_HEADS if is_full(layer) else KV_HEADS)
        q_dim = HEADS * head
        at = f"layers.{layer}."
        found |= {
            f"{at}self_attn.q_proj.weight": (q_dim, HIDDEN),
            f"{at}self_attn.k_proj.weight": (kv_dim, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, q_dim),
            f"{at}mlp.gate_proj.weight": (WIDE, HIDDEN),
            f"{at}mlp.up_proj.weight": (WIDE, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, WIDE),
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}layer_scalar": (1,),
        }
        if not is_full(layer):
            found[f"{at}self_attn.v_proj.weight"] = (kv_dim, HIDDEN)
    return {f"model.language_model.{name}": shape for name, shape in found.items()}


def write_sparse_checkpoint(directory: Path) -> int:
    """Write a whole header and a hole where the weights would be; return its bytes."""
    header, offset = {}, 0
    for name, shape in shapes().items():
        size = 2
        for dim in shape:
            size *= dim
        offsets = [offset, offset + size]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        offset += size
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config()))
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset


@pytest.mark.parametrize(("blocks", "rank"), [(10, 64), (60, None)])
def test_a_31b_checkpoint_is_planned_from_its_headers(
    tmp_path: Path, blocks: int, rank: int | None
) -> None:
    size = write_sparse_checkpoint(tmp_path / "model")
    assert size > 50e9
    command = [str(BIN / "attnquant"), "decompose", str(tmp_path / "model")]
    command += ["--blocks", str(blocks), "--dry-run", "--json"]
    command += [] if rank is None else ["--rank", str(rank)]
    # As Python has it: MAX, once imported, changes the process's own.
    environ = dict(os.environ)
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["source_bytes"] == size
    groups = {(g["family"], g["group"]): g for g in figures["groups"]}
    full = groups["q_proj", "full_attention"]
    assert full["shape"] == [HEADS * GLOBAL_HEAD_DIM, HIDDEN]
    # Ten full layers in ten bands: each base is one layer's own, and needs no factors.
    assert (full["bases"], full["layers"], full["rank"]) == (10, 10, 0)
    assert ("v_proj", "full_attention") not in groups
    sliding = groups["v_proj", "sliding_attention"]
    assert (sliding["layers"], sliding["rank"]) == (50, rank or 0)
    assert figures["peak_bytes"] < 15e9
    if rank is None:
        assert figures["bundle_bytes"] == size
        assert figures["seconds"] == 0
    else:
        assert figures["bundle_bytes"] < size / 3
        assert figures["seconds"] > 0
