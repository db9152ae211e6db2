"""Golden records of transformers' own Gemma 3: the file format and its reader.

A file is an npz: `manifest` (JSON as UTF-8 bytes) and the arrays of each record.
A record is one prompt under one setting, its logits held in one of two ways:

- `full`: float32 `[rows, vocab]`, of all positions or of the last alone.
- `sampled`, for large vocabularies: of the last position, the 256 largest logits and
  those at 16384 ids drawn once per file, uniformly and without replacement, and in
  float64 the log of the sum of exponentials over the whole vocabulary.

What `compare` computes from a `sampled` record are estimates of sums over the
vocabulary: the largest 256 enter with weight 1, the drawn ids outside them with
weight `(vocab - 256) / drawn outside them`. Each is unbiased, exactly 0 for equal
logits, and both softmax normalisers are exact, not estimated.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnquant.testing.metrics import Comparison

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Float64 = npt.NDArray[np.float64]
Families = Literal["all", "attn"]

TOP_IDS: Final = 256
SAMPLED_IDS: Final = 16384
_SAMPLE_SEED: Final = 20260101


@dataclass(frozen=True, slots=True)
class Setting:
    """A decomposition under the plain method; passthrough has no shared blocks."""

    name: str
    shared_blocks: int | None = None
    rank: int = 0
    families: Families = "all"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint the records were made from.

    `digest` is `checkpoints.digest` of its tensors as stored. `recipe` holds the
    arguments of `write_tiny_checkpoint` that make it again, if that made it.
    """

    name: str
    digest: str
    recipe: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One prompt under one setting.

    Attributes:
        source: name of the checkpoint.
        setting: the weights' decomposition.
        prompt: what the prompt is there for: `short`, `window` and so on.
        text: the prompt; `tokens` are its ids as fed, <bos> included.
        greedy: the ids that follow, end-of-sequence ids not stopping it.
        continuation: their text.
        smallest_margin: between the two largest logits, over the greedy steps.
        vocab_size: the model's.
        rows: the positions whose logits are held.
        ids: `[n]` vocabulary ids of the logits' columns, or None for all.
        weights: float64 `[n]`, what a column counts for in a sum over the vocabulary.
        logits: float32 `[rows, n]`.
        log_total: float64 `[rows]`, log-sum-exp over the whole vocabulary.
    """

    source: str
    setting: Setting
    prompt: str
    text: str
    tokens: tuple[int, ...]
    greedy: tuple[int, ...]
    continuation: str
    smallest_margin: float
    vocab_size: int
    rows: Literal["all", "last"]
    ids: npt.NDArray[np.int64] | None
    weights: Float64
    logits: npt.NDArray[np.float32]
    log_total: Float64

    @property
    def name(self) -> str:
        """A name for a test's parameter."""
        return f"{self.source}-{self.setting.name}-{self.prompt}"


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """A golden file: where its records come from, and the records.

    `drawn_ids` are the vocabulary ids that the `sampled` records share, ascending.
    """

    sources: tuple[Source, ...]
    versions: Mapping[str, str]
    drawn_ids: npt.NDArray[np.int64] | None
    records: tuple[Record, ...]

    def source(self, name: str) -> Source:
        """Return the checkpoint of that name."""
        return next(source for source in self.sources if source.name == name)


def compare(record: Record, logits_full: npt.NDArray[Any]) -> Comparison:
    """Compare logits over the whole vocabulary with a record.

    Args:
        record: the reference.
        logits_full: `[vocab]`, or `[T, vocab]` of the prompt's positions. A record
            of the last position takes the last row, and a single row is compared
            with the record's last.

    Raises:
        ValueError: the number of rows or of columns is not the prompt's.
    """
    candidate = np.atleast_2d(np.asarray(logits_full, dtype=np.float64))
    rows = min(len(candidate), len(record.logits))
    if len(candidate) not in {1, len(record.tokens)}:
        msg = f"{len(candidate)} rows of logits for {len(record.tokens)} tokens"
        raise ValueError(msg)
    if candidate.shape[1] != record.vocab_size:
        msg = f"vocabulary of {candidate.shape[1]}, expected {record.vocab_size}"
        raise ValueError(msg)
    candidate = candidate[-rows:]
    columns = candidate if record.ids is None else candidate[:, record.ids]
    reference = record.logits[-rows:].astype(np.float64)
    return Comparison(
        cosine_distance=_cosine_distance(reference, columns, record.weights),
        kl=_kl(
            reference - record.log_total[-rows:, None],
            columns - log_sum_exp(candidate)[:, None],
            record.weights,
        ),
    )


def _cosine_distance(a: Float64, b: Float64, weights: Float64) -> float:
    """`|â - b̂|² / 2`, which keeps the digits that `1 - cos` cancels."""
    apart = _unit_rows(a, weights) - _unit_rows(b, weights)
    return float(np.max(apart * apart @ weights) / 2.0)


def _unit_rows(x: Float64, weights: Float64) -> Float64:
    return np.asarray(x / np.sqrt(x * x @ weights)[:, None])


def _kl(log_p: Float64, log_q: Float64, weights: Float64) -> float:
    """Sum of `p log(p/q) - p + q`: no term is negative, so no estimate is."""
    p, q = np.exp(log_p), np.exp(log_q)
    return float(np.max((p * (log_p - log_q) - p + q) @ weights))


def log_sum_exp(logits: npt.NDArray[Any]) -> Float64:
    """Return the float64 log-sum-exp of each row of `[rows, vocab]`."""
    wide = logits.astype(np.float64)
    peak = wide.max(axis=-1)
    return np.asarray(peak + np.log(np.exp(wide - peak[:, None]).sum(axis=-1)))


# --- the file --------------------------------------------------------------------


def draw_ids(vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the ids a new file draws, ascending; a file holds its own."""
    words = np.random.PCG64(_SAMPLE_SEED).random_raw(vocab_size)
    return np.sort(np.argsort(words, kind="stable")[:SAMPLED_IDS])


def top_ids(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the ids of the largest of `logits [vocab]`, largest first."""
    return np.argsort(logits, kind="stable")[::-1][:TOP_IDS].astype(np.int64)


def sampled_columns(
    top: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64], vocab_size: int
) -> tuple[npt.NDArray[np.int64], Float64]:
    """Return `ids` and `weights` of a sampled record: the largest, then the drawn."""
    outside = drawn[~np.isin(drawn, top)]
    weight = (vocab_size - len(top)) / len(outside)
    return (
        np.concatenate([top, outside]),
        np.concatenate([np.ones(len(top)), np.full(len(outside), weight)]),
    )


_ARRAYS: Final = frozenset({"ids", "weights", "logits", "log_total"})


def save(path: Path, golden: Golden) -> None:
    """Write a golden file."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for i, record in enumerate(golden.records):
        arrays[f"{i}/logits"] = record.logits
        arrays[f"{i}/log_total"] = record.log_total
        if record.ids is not None:
            arrays[f"{i}/top_ids"] = record.ids[:TOP_IDS].astype(np.int32)
    if golden.drawn_ids is not None:
        arrays["drawn_ids"] = golden.drawn_ids.astype(np.int32)
    manifest = {
        "about": __doc__,
        "sources": [asdict(source) for source in golden.sources],
        "versions": dict(golden.versions),
        "records": [_entry(record) for record in golden.records],
    }
    text = json.dumps(manifest, ensure_ascii=False)
    arrays["manifest"] = np.frombuffer(text.encode(), dtype=np.uint8)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def _entry(record: Record) -> dict[str, Any]:
    """Return what of a record goes into the manifest: all but its arrays."""
    # Not asdict() of the record: it would copy every array to drop it.
    names = [field.name for field in fields(Record) if field.name not in _ARRAYS]
    entry = {name: getattr(record, name) for name in names}
    return entry | {"setting": asdict(record.setting)}


def load(path: Path) -> Golden:
    """Read a golden file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    manifest = json.loads(arrays["manifest"].tobytes())
    drawn = arrays.get("drawn_ids")
    return Golden(
        sources=tuple(Source(**source) for source in manifest["sources"]),
        versions=manifest["versions"],
        drawn_ids=None if drawn is None else drawn.astype(np.int64),
        records=tuple(
            _record(entry, arrays, i) for i, entry in enumerate(manifest["records"])
        ),
    )


def _record(
    entry: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]], i: int
) -> Record:
    vocab_size = entry["vocab_size"]
    ids, weights = None, np.ones(vocab_size)
    if (top := arrays.get(f"{i}/top_ids")) is not None:
        drawn = arrays["drawn_ids"].astype(np.int64)
        ids, weights = sampled_columns(top.astype(np.int64), drawn, vocab_size)
    changed = {
        "setting": Setting(**entry["setting"]),
        "tokens": tuple(entry["tokens"]),
        "greedy": tuple(entry["greedy"]),
    }
    return Record(
        **(entry | changed),
        ids=ids,
        weights=weights,
        logits=arrays[f"{i}/logits"],
        log_total=arrays[f"{i}/log_total"],
    )
