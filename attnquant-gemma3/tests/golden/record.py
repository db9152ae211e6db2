"""Record golden files from transformers' own Gemma 3, in float32 on a CPU.

Run it where torch and transformers are installed; nothing else needs them:

    python attnquant-gemma3/tests/golden/record.py --tiny \
        --setting 3:4:all --setting 5:8:attn --out tiny.npz
    python attnquant-gemma3/tests/golden/record.py --checkpoint DIR \
        --setting 9:64:all --setting 6:16:attn --out gemma3-270m.npz

Passthrough is always recorded; a `--setting G:r:all|attn` adds the checkpoint with
every tied projection replaced by its `W_eff` under the plain method. Those come from
the float64 reference in `gemma3_support.oracle`, not from the package under test.

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
from gemma3_support import golden
from gemma3_support.oracle import substitute_weff
from gemma3_support.tiny import write_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Not installed where this is type-checked.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

HERE: Final = Path(__file__).resolve().parent
LOG: Final = logging.getLogger("record")

GREEDY_STEPS: Final = 24
SMALLEST_MARGIN: Final = 1e-3
# Fewer distinct tokens in a continuation say little about the model.
FEWEST_DISTINCT: Final = 4
# Above it, logits over the whole vocabulary are too much for git.
LARGEST_FULL_VOCAB: Final = 4096
# Prompts up to this length have the logits of all positions recorded.
ALL_POSITIONS: Final = 32

PROMPTS: Final[Mapping[str, Sequence[str]]] = {
    "short": (
        "The capital of France is",
        "Water boils at a temperature of",
        "My favourite colour is",
    ),
    "word": ("Hello", "Once", "Because", "Music", "Tomorrow"),
    "code": (
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "for (int i = 0; i < n; i++) {\n    total +=",
        'import json\n\nwith open("data.json") as file:\n    data =',
    ),
    "german": (
        "Die Hauptstadt von Österreich ist Wien, und die größte Stadt der Schweiz",
        "Im Frühling blühen die Bäume, und die Vögel",
        "Wer über den Fluß möchte, braucht",
    ),
    "japanese": (
        "日本の首都は東京です。人口は",
        "昔々あるところに、おじいさんと",
        "今日は天気が良いので、",
    ),
}
# Words of prompts/long.txt, to be longer than the window, and longer still.
REAL_WORDS: Final = {
    "window": (470, 480, 490, 500, 510),
    "longer": (740, 750, 760, 770, 780),
}
TINY_WORDS: Final = {
    "window": (60, 62, 64, 66, 68, 70, 72, 74),
    "longer": (100, 102, 104, 106, 108, 110, 112, 114),
}

# The plain model; an untied head; and what else a config.json can ask for.
TINY: Final[Mapping[str, Mapping[str, Any]]] = {
    "tied": {"seed": 0},
    "untied": {"seed": 1, "tie_word_embeddings": False},
    "extras": {
        "seed": 2,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "hidden_activation": "silu",
        "final_logit_softcapping": 10.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "linear",
                "factor": 8.0,
                "rope_theta": 1_000_000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
}


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

    def __init__(self, directory: Path, settings: Sequence[golden.Setting]) -> None:
        """Load a checkpoint and work out the weights of every setting."""
        weights, config = read_checkpoint(directory)
        self.digest = digest(weights)
        self.vocab_size: int = config["vocab_size"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._model, loading = transformers.Gemma3ForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        if loading["missing_keys"] or loading["unexpected_keys"]:
            msg = f"{directory.name}: {loading}"
            raise ValueError(msg)
        eos = self._model.generation_config.eos_token_id
        self.eos = {eos} if isinstance(eos, int) else set(eos or ())
        # Effective weights are kept: a prompt's candidates come back to them.
        self._variants: dict[str, Mapping[str, npt.NDArray[Any]]] = {}
        for setting in settings:
            LOG.info("%s: weights of %s", directory.name, setting.name)
            self._variants[setting.name] = _effective(weights, setting)

    def apply(self, setting: golden.Setting) -> None:
        """Put a setting's weights into the model."""
        parameters = dict(self._model.named_parameters())
        for name, value in self._variants[setting.name].items():
            if name in parameters:
                wide = torch.from_numpy(value.astype(np.float32))
                parameters[name].data.copy_(wide)

    def run(self, tokens: Sequence[int]) -> Run:
        """Prefill and decode greedily, with transformers' own cache."""
        with torch.inference_mode():
            rows = 0 if self._keeps_all(tokens) else 1
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

    def _keeps_all(self, tokens: Sequence[int]) -> bool:
        return self.vocab_size <= LARGEST_FULL_VOCAB and len(tokens) <= ALL_POSITIONS

    def objection(self, run: Run) -> str | None:
        """Return why a run is unfit to be compared token by token, if it is."""
        if run.margin < SMALLEST_MARGIN:
            return f"margin {run.margin:.1e}"
        if self.eos & set(run.greedy):
            return "end of sequence"
        if len(set(run.greedy)) < FEWEST_DISTINCT:
            return "monotonous"
        return None


def _effective(
    weights: Mapping[str, npt.NDArray[Any]], setting: golden.Setting
) -> Mapping[str, npt.NDArray[Any]]:
    if setting.shared_blocks is None:
        return weights
    return substitute_weff(
        weights, setting.rank, setting.shared_blocks, setting.families
    )


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
            records.append(_record(subject, setting, prompt, run))
        else:
            return records
    msg = f"no candidate for {candidates[0].purpose!r} is fit under every setting"
    raise SystemExit(msg)


def _record(
    subject: Subject, setting: golden.Setting, prompt: Prompt, run: Run
) -> golden.Record:
    ids, weights, logits = None, np.ones(subject.vocab_size), run.logits
    if subject.vocab_size > LARGEST_FULL_VOCAB:
        top = golden.top_ids(run.logits[0])
        drawn = golden.draw_ids(subject.vocab_size)
        ids, weights = golden.sampled_columns(top, drawn, subject.vocab_size)
        logits = run.logits[:, ids]
    return golden.Record(
        source=prompt.source,
        setting=setting,
        prompt=prompt.purpose,
        text=prompt.text,
        tokens=prompt.tokens,
        greedy=run.greedy,
        continuation=subject.tokenizer.decode(run.greedy),
        smallest_margin=run.margin,
        vocab_size=subject.vocab_size,
        rows="all" if len(run.logits) == len(prompt.tokens) else "last",
        ids=ids,
        weights=weights,
        logits=logits,
        log_total=golden.log_sum_exp(run.logits),
    )


def _prompts(words: Mapping[str, Sequence[int]]) -> dict[str, Sequence[str]]:
    """Return every prompt's candidates, the long ones cut to numbers of words."""
    text = (HERE / "prompts" / "long.txt").read_text(encoding="utf-8")
    cuts = {
        prompt: [" ".join(text.split(" ")[:count]) for count in counts]
        for prompt, counts in words.items()
    }
    return {**PROMPTS, **cuts}


def _checkpoints(
    directory: Path | None, scratch: Path
) -> Iterator[tuple[str, Path, Mapping[str, Any] | None]]:
    """Yield name, directory and recipe of the checkpoints to record."""
    if directory is not None:
        yield directory.name, directory, None
        return
    for name, recipe in TINY.items():
        yield name, write_tiny_checkpoint(scratch / name, **recipe), recipe


def _setting(text: str) -> golden.Setting:
    blocks, rank, families = text.split(":")
    if families not in {"all", "attn"}:
        msg = f"{families!r} is neither 'all' nor 'attn'"
        raise argparse.ArgumentTypeError(msg)
    return golden.Setting(
        name=f"g{blocks}-r{rank}-{families}",
        shared_blocks=int(blocks),
        rank=int(rank),
        families="all" if families == "all" else "attn",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, help="a checkpoint's directory")
    source.add_argument("--tiny", action="store_true", help="the tiny checkpoints")
    parser.add_argument("--setting", type=_setting, action="append", default=[])
    parser.add_argument("--out", type=Path, required=True, help="the npz to write")
    return parser.parse_args()


def main() -> None:
    """Record one golden file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = _arguments()
    settings = [golden.Setting("passthrough"), *arguments.setting]
    prompts = _prompts(TINY_WORDS if arguments.tiny else REAL_WORDS)
    sources: list[golden.Source] = []
    records: list[golden.Record] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory, recipe in _checkpoints(
            arguments.checkpoint, Path(scratch)
        ):
            subject = Subject(directory, settings)
            sources.append(golden.Source(name, subject.digest, recipe))
            for purpose, texts in prompts.items():
                candidates = [
                    Prompt(name, purpose, text, tuple(subject.tokenizer.encode(text)))
                    for text in texts
                ]
                records += _record_prompt(subject, settings, candidates)
    vocab_size = records[0].vocab_size
    sampled = vocab_size > LARGEST_FULL_VOCAB
    golden.save(
        arguments.out,
        golden.Golden(
            sources=tuple(sources),
            versions={m.__name__: m.__version__ for m in (torch, transformers, np)},
            drawn_ids=golden.draw_ids(vocab_size) if sampled else None,
            records=tuple(records),
        ),
    )
    smallest = min(record.smallest_margin for record in records)
    size = arguments.out.stat().st_size
    LOG.info("%d records, %d bytes, margin %.2e", len(records), size, smallest)


if __name__ == "__main__":
    main()
