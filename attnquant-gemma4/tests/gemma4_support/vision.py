"""A vision tower beside the tiny decoder, and the images that go through it.

The decoder is that of `gemma4_support.tiny`, bit for bit, so its graph is as well.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from attnquant.testing.checkpoints import BFLOAT16
from gemma4_support.tiny import TOKEN_IDS, write_tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

IMAGE: Final = TOKEN_IDS["<|image|>"]
BEGIN, END = TOKEN_IDS["<|image>"], TOKEN_IDS["<image|>"]
PATCH: Final = 16
POOL: Final = 3
"""So many patches a side make one soft token."""

SIZES: Final = {6: (3, 2), 12: (4, 3)}
"""How wide and high the images are, in soft tokens, by how many those are."""

VISION_CONFIG: Final[dict[str, Any]] = {
    "model_type": "gemma4_vision",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 192,
    "max_position_embeddings": 1024,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "position_embedding_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "standardize": True,
    "use_clipped_linears": False,
}


def write_multimodal_checkpoint(directory: Path, **recipe: Any) -> Path:
    """Write a tiny checkpoint with a vision tower and return its directory.

    Args:
        directory: Created where absent.
        recipe: As `write_tiny_checkpoint` takes it.
    """
    storage = BFLOAT16 if recipe.get("dtype") == "bfloat16" else np.dtype(np.float32)
    hidden = recipe.get("hidden_size", 96)
    tower = {
        f"model.{name}": tensor.astype(storage)
        for name, tensor in tower_weights(hidden).items()
    }
    write_tiny_checkpoint(directory, extra=tower, **recipe)
    _update_json(directory / "config.json", vision_config=VISION_CONFIG)
    # Images are taken as they are: their sizes are multiples of a soft token's.
    processor = {"do_resize": False, "max_soft_tokens": 70}
    _update_json(directory / "processor_config.json", image_processor=processor)
    return directory


def _update_json(path: Path, **fields: Any) -> None:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(found | fields, indent=2) + "\n", encoding="utf-8")


def tower_weights(text_hidden: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tower's tensors and the projection into the decoder's stream."""
    config = VISION_CONFIG
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    linears = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (heads, hidden),
        "self_attn.v_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    norms = {
        "self_attn.q_norm": config["head_dim"],
        "self_attn.k_norm": config["head_dim"],
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "pre_feedforward_layernorm": hidden,
        "post_feedforward_layernorm": hidden,
    }
    pixels, positions = 3 * PATCH**2, config["position_embedding_size"]
    # Small matrices of one generator: how they are drawn matters to nobody, only that
    # they are the same everywhere, which golden records pin.
    words = np.random.PCG64(7)

    def draw(*shape: int, mean: float = 0.0, scale: float = 1.0) -> Any:
        raw = words.random_raw(int(np.prod(shape))) >> 11
        uniform = raw.astype(np.float64) / 2**53 - 0.5
        return (mean + scale * uniform.reshape(shape)).astype(np.float32)

    table = "vision_tower.patch_embedder.position_embedding_table"
    tensors = {
        "vision_tower.patch_embedder.input_proj.weight": draw(
            hidden, pixels, scale=pixels**-0.5
        ),
        table: draw(2, positions, hidden),
        "vision_tower.std_bias": draw(hidden),
        "vision_tower.std_scale": draw(hidden, mean=0.1, scale=0.1),
        "embed_vision.embedding_projection.weight": draw(
            text_hidden, hidden, scale=hidden**-0.5
        ),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"vision_tower.encoder.layers.{layer}."
        for name, (out, width) in linears.items():
            scale = 2 * width**-0.5
            tensors[f"{at}{name}.linear.weight"] = draw(out, width, scale=scale)
        for name, width in norms.items():
            tensors[f"{at}{name}.weight"] = draw(width, mean=1.0, scale=0.5)
    return tensors


def pixels(soft_tokens: int) -> npt.NDArray[np.uint8]:
    """Return an image of so many soft tokens, ``[height, width, 3]``."""
    across, down = SIZES[soft_tokens]
    side = POOL * PATCH
    shape = (down * side, across * side, 3)
    words = np.random.PCG64(soft_tokens).random_raw(int(np.prod(shape)))
    noise = (words % 64).astype(np.float64).reshape(shape)
    rows, columns = np.mgrid[0 : shape[0], 0 : shape[1]]
    slope = np.stack([rows, columns, rows + columns], axis=-1)
    return np.asarray(noise + slope * (190 / slope.max()), dtype=np.uint8)


def png(soft_tokens: int) -> bytes:
    """Return that image as a client would send it."""
    # Not needed where golden files are recorded.
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels(soft_tokens)).save(buffer, "PNG")
    return buffer.getvalue()


def patches(
    soft_tokens: int,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return that image's patches ``[n, 768]`` in 0 to 1, and their (x, y) ``[n, 2]``.

    Row by row; within a patch by row, column and colour, as transformers' processor.
    """
    image = pixels(soft_tokens).astype(np.float32) / np.float32(255)
    high, wide = image.shape[0] // PATCH, image.shape[1] // PATCH
    blocks = image.reshape(high, PATCH, wide, PATCH, 3).transpose(0, 2, 1, 3, 4)
    y, x = np.mgrid[0:high, 0:wide]
    grid = np.stack([x, y], axis=-1).reshape(-1, 2)
    return blocks.reshape(high * wide, -1), grid


def placeholders(soft_tokens: int) -> list[int]:
    """Return what stands for an image in a prompt's ids."""
    return [BEGIN, *[IMAGE] * soft_tokens, END]
