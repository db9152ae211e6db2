"""Record what transformers' own Gemma 4 makes of prompts with images, in float32.

Run it where torch and transformers are installed; nothing else needs them:

    python attnquant-gemma4/tests/golden/record_images.py --out images.npz

The checkpoint is the tiny one with a vision tower, as it is and with every tied
projection replaced by its `W_eff`. Of each prompt the file holds its `content`, as chat
messages have it, in JSON; its `tokens`; and of each setting the `greedy` tokens and the
`logits` that follow: `{prompt}/...` and `{setting}/{prompt}/...`. Beside them it holds
the embeddings of each image, `features/{soft tokens}`, so that a decoder can be
compared where nothing can encode images.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# A script, run where the repository is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "attnquant-core/src"))

from attnquant.testing.checkpoints import read_checkpoint
from gemma4_support import vision
from gemma4_support.oracle import substitute_weff
from gemma4_support.tiny import TOKEN_IDS

# Not installed where this is type-checked.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

LOG: Final = logging.getLogger("record")
GREEDY_STEPS: Final = 24
SMALLEST_MARGIN: Final = 1e-3
CANDIDATES: Final = 40
PLACEHOLDERS: Final = {TOKEN_IDS[f"<|{kind}|>"] for kind in ("image", "audio", "video")}
WORDS: Final = "What do you see here, and what is it for? Tell me more than I asked. "
PROMPTS: Final = {"image": ([6], 1), "images": ([12, 6], 4)}
"""Images by soft tokens, and how often the words come after each: the second prompt and
its images reach further back than the window of 128."""


def load(directory: Path) -> Any:
    """Load a checkpoint, complaining of any tensor that it lacks or has too many."""
    model, loading = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if loading["missing_keys"] or loading["unexpected_keys"]:
        raise ValueError(str(loading))
    return model


def images_of(sizes: Sequence[int]) -> dict[str, Any]:
    """Return the model's arguments for images, padded as by transformers' processor."""
    parts = [vision.patches(size) for size in sizes]
    most = max(len(values) for values, _ in parts)
    pixels = np.zeros((len(parts), most, parts[0][0].shape[1]), np.float32)
    grids = np.full((len(parts), most, 2), -1, np.int64)
    for i, (values, grid) in enumerate(parts):
        pixels[i, : len(values)], grids[i, : len(grid)] = values, grid
    return {
        "pixel_values": torch.from_numpy(pixels),
        "image_position_ids": torch.from_numpy(grids),
    }


def run(
    model: Any, tokens: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], float, npt.NDArray[np.float32]]:
    """Return the greedy continuation, its smallest margin, and the first logits."""
    with torch.inference_mode():
        step = model(torch.tensor([list(tokens)]), logits_to_keep=1, **images_of(sizes))
        logits = step.logits[0].numpy().copy()
        greedy: list[int] = []
        margins: list[float] = []
        while len(greedy) < GREEDY_STEPS:
            best = torch.topk(step.logits[0, -1], 2)
            margins.append(float(best.values[0] - best.values[1]))
            greedy.append(int(best.indices[0]))
            step = model(
                torch.tensor([greedy[-1:]]), past_key_values=step.past_key_values
            )
    return greedy, min(margins), logits


def candidates(purpose: str) -> Iterator[list[dict[str, str]]]:
    """Yield contents of messages: images, each with words after it."""
    sizes, times = PROMPTS[purpose]
    for number in range(CANDIDATES):
        content = []
        for _ in sizes:
            text = f"({number}) " + WORDS * times
            content += [{"type": "image"}, {"type": "text", "text": text.strip()}]
        yield content


def tokenize(tokenizer: Any, content: Any, sizes: Sequence[int]) -> list[int]:
    """Return the ids of a chat, with a placeholder for each soft token of an image."""
    chat = [{"role": "user", "content": content}]
    first, *rest = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    ).split("<|image|>")
    ids = tokenizer.encode(first, add_special_tokens=False)
    for size, part in zip(sizes, rest, strict=True):
        ids += vision.placeholders(size)
        ids += tokenizer.encode(part, add_special_tokens=False)
    return [int(token) for token in ids]


def record(
    model: Any, tokenizer: Any, variants: dict[str, dict[str, Any]], purpose: str
) -> dict[str, npt.NDArray[Any]]:
    """Return the records of the first prompt that is fit under every setting."""
    sizes = PROMPTS[purpose][0]
    for content in candidates(purpose):
        tokens = tokenize(tokenizer, content, sizes)
        found: dict[str, npt.NDArray[Any]] = {
            f"{purpose}/content": np.asarray(json.dumps(content)),
            f"{purpose}/tokens": np.asarray(tokens),
        }
        for setting, weights in variants.items():
            tensors = model.state_dict()
            for name, value in weights.items():
                tensors[name].copy_(torch.from_numpy(value.astype(np.float32)))
            greedy, margin, logits = run(model, tokens, sizes)
            LOG.info("%s %s: margin %.1e", setting, purpose, margin)
            # Neither near ties nor placeholders: equality of greedy text must not hang
            # on rounding, and transformers embeds padding where they stand.
            if margin < SMALLEST_MARGIN or PLACEHOLDERS & set(greedy):
                break
            at = f"{setting}/{purpose}"
            found |= {
                f"{at}/greedy": np.asarray(greedy),
                f"{at}/logits": logits,
            }
        else:
            return found
    msg = f"no candidate for {purpose!r} is fit under every setting"
    raise SystemExit(msg)


def main() -> None:
    """Record the golden file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the npz to write")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        directory = vision.write_multimodal_checkpoint(Path(scratch) / "tiny")
        weights, config = read_checkpoint(directory)
        model = load(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for size in vision.SIZES:
        with torch.inference_mode():
            features = model.model.get_image_features(
                *images_of([size]).values(), return_dict=True
            )
        arrays[f"features/{size}"] = features.pooler_output.numpy()
    variants = {
        "passthrough": dict(weights),
        "g4-r4-all": dict(substitute_weff(weights, config, 4, 4, "all")),
    }
    for purpose in PROMPTS:
        arrays |= record(model, tokenizer, variants, purpose)
    np.savez_compressed(out, allow_pickle=False, **arrays)
    LOG.info("%d arrays, %d bytes", len(arrays), out.stat().st_size)


if __name__ == "__main__":
    main()
