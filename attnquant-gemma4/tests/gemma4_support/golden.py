"""Golden records of transformers' own Gemma 4: the file format and its reader.

A file is an npz: `manifest` (JSON as UTF-8 bytes) and the logits of each record. A
record is one prompt under one setting; its logits are float32 `[rows, vocab]`, of all
positions or of the last alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from attnquant.testing.metrics import Comparison, compare_logits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Families = Literal["all", "attn"]


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

    `digest` is `checkpoints.digest` of its tensors as stored, and `recipe` holds the
    arguments of `write_tiny_checkpoint` that make it again.
    """

    name: str
    digest: str
    recipe: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One prompt under one setting.

    Attributes:
        source: name of the checkpoint.
        setting: the weights' decomposition.
        prompt: what the prompt is there for: `short`, `window` and so on.
        text: the prompt; `tokens` are its ids as fed, <bos> included.
        greedy: the ids that follow, end-of-sequence ids not stopping it.
        smallest_margin: between the two largest logits, over the greedy steps.
        logits: float32 `[rows, vocab]`; a single row is that of the last position.
    """

    source: str
    setting: Setting
    prompt: str
    text: str
    tokens: tuple[int, ...]
    greedy: tuple[int, ...]
    smallest_margin: float
    logits: npt.NDArray[np.float32]

    @property
    def name(self) -> str:
        """A name for a test's parameter."""
        return f"{self.source}-{self.setting.name}-{self.prompt}"


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """A golden file: where its records come from, and the records."""

    sources: tuple[Source, ...]
    versions: Mapping[str, str]
    records: tuple[Record, ...]

    def source(self, name: str) -> Source:
        """Return the checkpoint of that name."""
        return next(source for source in self.sources if source.name == name)

    def of(self, source: str, setting: str) -> list[Record]:
        """Return the records of a checkpoint under a setting."""
        names = (source, setting)
        return [r for r in self.records if (r.source, r.setting.name) == names]


def compare(record: Record, logits: npt.NDArray[Any]) -> Comparison:
    """Compare logits with a record.

    Args:
        record: the reference.
        logits: `[vocab]`, or `[T, vocab]` of the prompt's positions. A record of the
            last position takes the last row, and a single row is compared with the
            record's last.

    Raises:
        ValueError: the number of rows or of columns is not the prompt's.
    """
    candidate = np.atleast_2d(np.asarray(logits, dtype=np.float64))
    rows = min(len(candidate), len(record.logits))
    if len(candidate) not in {1, len(record.tokens)}:
        msg = f"{len(candidate)} rows of logits for {len(record.tokens)} tokens"
        raise ValueError(msg)
    if candidate.shape[1] != record.logits.shape[1]:
        msg = f"vocabulary of {candidate.shape[1]}, expected {record.logits.shape[1]}"
        raise ValueError(msg)
    pair = record.logits[-rows:], candidate[-rows:]
    return compare_logits(*pair)


# --- the file --------------------------------------------------------------------


def save(path: Path, golden: Golden) -> None:
    """Write a golden file."""
    arrays = {f"{i}/logits": record.logits for i, record in enumerate(golden.records)}
    # Not asdict() of a record: it would copy its array to drop it.
    names = [field.name for field in fields(Record) if field.name != "logits"]
    manifest = {
        "about": __doc__,
        "sources": [asdict(source) for source in golden.sources],
        "versions": dict(golden.versions),
        "records": [
            {name: getattr(record, name) for name in names}
            | {"setting": asdict(record.setting)}
            for record in golden.records
        ],
    }
    text = json.dumps(manifest, ensure_ascii=False)
    np.savez_compressed(
        path,
        allow_pickle=False,
        manifest=np.frombuffer(text.encode(), dtype=np.uint8),
        **arrays,
    )


def load(path: Path) -> Golden:
    """Read a golden file."""
    with np.load(path, allow_pickle=False) as file:
        manifest = json.loads(file["manifest"].tobytes())
        records = [
            _record(entry, file[f"{i}/logits"])
            for i, entry in enumerate(manifest["records"])
        ]
    return Golden(
        sources=tuple(Source(**source) for source in manifest["sources"]),
        versions=manifest["versions"],
        records=tuple(records),
    )


def _record(entry: dict[str, Any], logits: npt.NDArray[np.float32]) -> Record:
    changed = {
        "setting": Setting(**entry["setting"]),
        "tokens": tuple(entry["tokens"]),
        "greedy": tuple(entry["greedy"]),
    }
    return Record(**(entry | changed), logits=logits)
