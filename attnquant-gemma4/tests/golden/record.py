"""Record the golden file from transformers' own Gemma 4, in float32 on a CPU.

Run it where torch and transformers are installed; nothing else needs them:

    python attnquant-gemma4/tests/golden/record.py --out tiny.npz

Each checkpoint is recorded as it is, and with every tied projection replaced by its
`W_eff` under the plain method. That comes from the float64 reference in
`gemma4_support.oracle`, not from the package under test.

Each prompt has candidates, and the first is taken whose greedy tokens are, under
every setting, clear of near ties and of end-of-sequence tokens: equality of greedy
text must not hang on rounding.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

# A script, run where the repository is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "attnquant-core/src"))

from attnquant.testing.checkpoints import digest, read_checkpoint
from gemma4_support import golden
from gemma4_support.oracle import substitute_weff
from gemma4_support.tiny import BOS, SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Not installed where this is type-checked.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

LOG: Final = logging.getLogger("record")

GREEDY_STEPS: Final = 24
SMALLEST_MARGIN: Final = 1e-3
# Fewer distinct tokens in a continuation say little about the model.
FEWEST_DISTINCT: Final = 4
# Prompts up to this length have the logits of all positions recorded.
ALL_POSITIONS: Final = 32

PASSTHROUGH: Final = golden.Setting("passthrough")
TINY: Final[Mapping[str, tuple[Mapping[str, Any], golden.Setting]]] = {
    # Every sixth layer full; the last band has a full layer and no sliding one.
    "pattern": ({"seed": 0}, golden.Setting("g4-r4-all", 4, 4)),
    # Kinds in no order, full layers with values of their own, untied, no soft cap.
    "irregular": (
        {
            "seed": 1,
            "layer_types": "fssfsff",
            "attention_k_eq_v": False,
            "final_logit_softcapping": None,
            "num_global_key_value_heads": None,
            "tie_word_embeddings": False,
        },
        golden.Setting("g3-r8-attn", 3, 8, "attn"),
    ),
    "experts": (
        {
            "seed": 2,
            "layer_types": "ssf",
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
        golden.Setting("g2-r4-all", 2, 4),
    ),
}
TEXTS: Final[Mapping[str, Sequence[str]]] = {
    "short": (
        "The capital of France is",
        "Water boils at a temperature of",
        "My favourite colour is",
        "She sells sea shells",
        "Once upon a time there was",
        "The answer to this is",
    ),
    "word": ("Hello", "Once", "Because", "Music", "Tomorrow", "Green", "Why", "Seven"),
    "japanese": (
        "日本の首都は",
        "昔々あるところに",
        "今日は天気が",
        "東京駅から歩いて",
        "私の名前は",
        "山の上に",
    ),
}
# Lengths of random prompts: about the window of 128, so that decoding crosses it, and
# more than twice that.
LENGTHS: Final = {"edge": 120, "window": 150, "longer": 290}
CANDIDATES: Final = 16


class Prompt(NamedTuple):
    """One candidate: of which checkpoint and purpose, its text, its ids."""

    source: str
    purpose: str
    text: str
    tokens: tuple[int, ...]


class Run(NamedTuple):
    """What one prompt gave under one setting; logits float32 `[rows, vocab]`."""

    greedy: tuple[int, ...]
    margin: float
    logits: npt.NDArray[np.float32]


class Subject:
    """One checkpoint in transformers, whose weights are exchanged per setting."""

    def __init__(self, directory: Path, settings: Iterable[golden.Setting]) -> None:
        """Load a checkpoint and work out the weights of every setting."""
        weights, config = read_checkpoint(directory)
        self.digest = digest(weights)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._model, loading = (
            transformers.Gemma4ForConditionalGeneration.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
        )
        if loading["missing_keys"] or loading["unexpected_keys"]:
            msg = f"{directory.name}: {loading}"
            raise ValueError(msg)
        self._eos = set(config["eos_token_id"])
        # What transformers puts the embedding of <pad> in place of.
        self._placeholders = {
            config[f"{kind}_token_id"] for kind in ("image", "audio", "video")
        }
        self._variants: dict[str, Mapping[str, npt.NDArray[Any]]] = {}
        for setting in settings:
            self._variants[setting.name] = (
                weights
                if setting.shared_blocks is None
                else substitute_weff(
                    weights,
                    config,
                    setting.rank,
                    setting.shared_blocks,
                    setting.families,
                )
            )

    def apply(self, setting: golden.Setting) -> None:
        """Put a setting's weights into the model."""
        tensors = self._model.state_dict()
        for name, value in self._variants[setting.name].items():
            tensors[name].copy_(torch.from_numpy(value.astype(np.float32)))

    def run(self, tokens: Sequence[int]) -> Run:
        """Prefill and decode greedily, with transformers' own cache."""
        with torch.inference_mode():
            rows = 0 if len(tokens) <= ALL_POSITIONS else 1
            step = self._model(torch.tensor([list(tokens)]), logits_to_keep=rows)
            logits = step.logits[0].numpy().copy()
            greedy: list[int] = []
            margins: list[float] = []
            while len(greedy) < GREEDY_STEPS:
                best = torch.topk(step.logits[0, -1], 2)
                margins.append(float(best.values[0] - best.values[1]))
                greedy.append(int(best.indices[0]))
                step = self._model(
                    torch.tensor([greedy[-1:]]), past_key_values=step.past_key_values
                )
        return Run(tuple(greedy), min(margins), logits)

    def objection(self, run: Run) -> str | None:
        """Return why a run is unfit to be compared token by token, if it is."""
        if run.margin < SMALLEST_MARGIN:
            return f"margin {run.margin:.1e}"
        if self._eos & set(run.greedy):
            return "end of sequence"
        if self._placeholders & set(run.greedy):
            return "a placeholder"
        if len(set(run.greedy)) < FEWEST_DISTINCT:
            return "monotonous"
        return None


def _record_prompt(
    subject: Subject,
    settings: Sequence[golden.Setting],
    candidates: Sequence[Prompt],
) -> list[golden.Record]:
    """Return the records of the first candidate that is fit under every setting."""
    for prompt in candidates:
        records: list[golden.Record] = []
        for setting in settings:
            subject.apply(setting)
            run = subject.run(prompt.tokens)
            objection = subject.objection(run)
            LOG.info(
                "%s %s %d tokens, %s: margin %.2e%s",
                *(prompt.source, prompt.purpose, len(prompt.tokens), setting.name),
                *(run.margin, f": {objection}, next candidate" if objection else ""),
            )
            if objection:
                break
            records.append(
                golden.Record(
                    source=prompt.source,
                    setting=setting,
                    prompt=prompt.purpose,
                    text=prompt.text,
                    tokens=prompt.tokens,
                    greedy=run.greedy,
                    smallest_margin=run.margin,
                    logits=run.logits,
                )
            )
        else:
            return records
    msg = f"no candidate for {candidates[0].purpose!r} is fit under every setting"
    raise SystemExit(msg)


def _candidates(source: str, tokenizer: Any) -> dict[str, list[Prompt]]:
    """Return every prompt's candidates; the long ones are random tokens."""
    prompts = {
        purpose: [Prompt(source, purpose, t, tuple(tokenizer.encode(t))) for t in texts]
        for purpose, texts in TEXTS.items()
    }
    first = len(SPECIAL_TOKENS)
    for purpose, length in LENGTHS.items():
        prompts[purpose] = []
        for seed in range(CANDIDATES):
            words = np.random.PCG64(seed).random_raw(length - 1)
            ids = [int(word % (VOCAB_SIZE - first)) + first for word in words]
            prompts[purpose].append(Prompt(source, purpose, "", (BOS, *ids)))
    return prompts


def main() -> None:
    """Record the golden file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the npz to write")
    out = parser.parse_args().out
    sources: list[golden.Source] = []
    records: list[golden.Record] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (recipe, shared) in TINY.items():
            directory = write_tiny_checkpoint(Path(scratch) / name, **recipe)
            settings = [PASSTHROUGH, shared]
            subject = Subject(directory, settings)
            sources.append(golden.Source(name, subject.digest, recipe))
            for candidates in _candidates(name, subject.tokenizer).values():
                records += _record_prompt(subject, settings, candidates)
    versions = {m.__name__: m.__version__ for m in (torch, transformers, np)}
    golden.save(out, golden.Golden(tuple(sources), versions, tuple(records)))
    smallest = min(record.smallest_margin for record in records)
    size = out.stat().st_size
    LOG.info("%d records, %d bytes, margin %.2e", len(records), size, smallest)


if __name__ == "__main__":
    main()
