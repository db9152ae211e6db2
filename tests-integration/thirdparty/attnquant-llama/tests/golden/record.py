"""Record what transformers' own Llama makes of SmolLM2, greedily, in float32.

Run it where torch, transformers and attnquant-core are installed; nothing else needs
torch:

    python tests/golden/record.py --checkpoint DIR --out tests/golden/smollm2.json
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from attnquant.testing import digest, read_checkpoint

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

STEPS = 32
SMALLEST_MARGIN = 1e-3
TEXTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village by the sea, there lived",
    "The quick brown fox jumps over the lazy dog. " * 40 + "The quick",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Name three colours, separated by commas."}],
]


def main() -> None:
    """Record one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = transformers.LlamaForCausalLM.from_pretrained(
        arguments.checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    records = []
    for messages in [None] * len(TEXTS) + CHATS:
        text = TEXTS[len(records)] if messages is None else None
        tokens = (
            tokenizer.encode(text)
            if messages is None
            else tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        greedy, margin = continue_greedily(model, tokens)
        if margin < SMALLEST_MARGIN:
            raise SystemExit(f"{text or messages}: a near tie, {margin:.1e}")
        end = tokenizer.eos_token_id
        answer = greedy[: greedy.index(end)] if end in greedy else greedy
        records.append(
            {
                "text": text,
                "messages": messages,
                "tokens": tokens,
                "greedy": greedy,
                "answer": tokenizer.decode(answer),
                "smallest_margin": margin,
            }
        )
    golden = {
        "source": digest(read_checkpoint(arguments.checkpoint)[0]),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers)},
        "records": records,
    }
    text = json.dumps(golden, indent=1, ensure_ascii=False)
    arguments.out.write_text(text + "\n", encoding="utf-8")


def continue_greedily(model: Any, tokens: list[int]) -> tuple[list[int], float]:
    """Return `STEPS` tokens, whatever they are, and the smallest lead of one."""
    greedy: list[int] = []
    margins = []
    with torch.inference_mode():
        step = model(torch.tensor([tokens]))
        while len(greedy) < STEPS:
            best = torch.topk(step.logits[0, -1], 2)
            margins.append(float(best.values[0] - best.values[1]))
            greedy.append(int(best.indices[0]))
            step = model(
                torch.tensor([greedy[-1:]]), past_key_values=step.past_key_values
            )
    return greedy, min(margins)


if __name__ == "__main__":
    main()
