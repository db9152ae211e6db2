"""Parity of a served model with records of a reference, for any architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeVar

from attnquant.plugins import installed_plugins
from attnquant.testing.in_process import Generated, InProcessModel
from attnquant.testing.metrics import Array, Comparison, compare_logits
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.writer import Plan, plan_decomposition, write_bundle

LIMIT: Final = 1e-5
"""Cosine distance, and Kullback-Leibler divergence in nats, that parity allows."""

GREEDY_STEPS: Final = 24
MAX_LENGTH: Final = 1024


class Setting(Protocol):
    """A decomposition: G (None at passthrough), r and the tie mode."""

    @property
    def shared_blocks(self) -> int | None:
        """G; None at passthrough."""
        ...

    @property
    def rank(self) -> int:
        """The rank r; 0 at passthrough."""
        ...

    @property
    def families(self) -> str:
        """The tie mode."""
        ...


class Record(Protocol):
    """A prompt, and what a reference makes of it."""

    @property
    def name(self) -> str:
        """What to call it in a test's output."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt."""
        ...

    @property
    def greedy(self) -> Sequence[int]:
        """The `GREEDY_STEPS` tokens that follow."""
        ...


AnyRecord = TypeVar("AnyRecord", bound=Record)


def make_plan(checkpoint: Path, setting: Setting, dtype: str = "float32") -> Plan:
    """Plan the decomposition of a checkpoint, by its architecture's plugin."""
    source = open_checkpoint(checkpoint)
    supplied = installed_plugins().find(source.architecture)
    return plan_decomposition(
        source,
        supplied.prefix_map(source.config),
        supplied.grouping(source.text_config),
        shared_blocks=setting.shared_blocks or source.num_layers,
        lora_rank=setting.rank or None,
        tie_families=setting.families,
        dtype=dtype,
    )


def make_bundle(
    checkpoint: Path, setting: Setting, out: Path, dtype: str = "float32"
) -> Path:
    """Write the bundle of a setting, by default in float32 as references have it.

    Args:
        checkpoint: The original.
        setting: G, r and the tie mode.
        out: Where the bundle goes.
        dtype: Storage dtype of bases and factors.
    """
    return write_bundle(make_plan(checkpoint, setting, dtype), out).path


@contextmanager
def serving(path: Path, formulation: str, **environ: str) -> Iterator[InProcessModel]:
    """Serve a checkpoint or bundle in this process."""
    model = InProcessModel(
        path,
        environ={"ATTNQUANT_FORMULATION": formulation, **environ},
        max_length=MAX_LENGTH,
    )
    try:
        yield model
    finally:
        model.close()


def check_record(
    model: InProcessModel,
    record: AnyRecord,
    compare: Callable[[AnyRecord, Array], Comparison],
) -> Generated:
    """Check one prompt, served alone, against its record; print the figures.

    Args:
        model: What is served.
        record: The reference.
        compare: Compares logits ``[vocabulary]`` of the prompt's last position with
            the record's.

    Returns:
        What it gave, for comparison with what it gives in a batch.
    """
    (alone,) = model.generate([record.tokens], GREEDY_STEPS)
    _check(record.name, compare(record, alone.logits[0]))
    assert list(record.greedy) == alone.tokens, record.name
    return alone


def check_batch(
    model: InProcessModel, records: Sequence[Record], alone: Sequence[Generated]
) -> None:
    """Check that prompts of different lengths give in a batch what each gives alone."""
    together = model.generate([record.tokens for record in records], GREEDY_STEPS)
    for record, one, batched in zip(records, alone, together, strict=True):
        _check(f"{record.name} in a batch", compare_logits(one.logits, batched.logits))
        assert one.tokens == batched.tokens, record.name


def _check(name: str, found: Comparison) -> None:
    print(f"{name}: cosine distance {found.cosine_distance:.1e}, KL {found.kl:.1e}")
    assert found.cosine_distance < LIMIT, name
    assert found.kl < LIMIT, name
