"""Parity of a served model with golden records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from attnquant.plugins import installed_plugins
from attnquant.testing.in_process import Generated, InProcessModel
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.writer import Plan, plan_decomposition, write_bundle
from gemma4_support.golden import Comparison, Record, Setting, compare
from gemma4_support.oracle import cosine_distance, kl_divergence

LIMIT: Final = 1e-5
"""Cosine distance, and Kullback-Leibler divergence in nats, that parity allows."""

GREEDY_STEPS: Final = 24
MAX_LENGTH: Final = 1024


def make_plan(checkpoint: Path, setting: Setting, dtype: str = "float32") -> Plan:
    """Plan the decomposition of a setting; G is None at passthrough."""
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
    """Write the bundle of a setting, by default in float32 as goldens are."""
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


def check_record(model: InProcessModel, record: Record) -> Generated:
    """Check one prompt, served alone, against its record; print the figures.

    Returns:
        What it gave, for comparison with what it gives in a batch.
    """
    (alone,) = model.generate([record.tokens], GREEDY_STEPS)
    # Its prompt's last position is the one whose logits are recorded in every case.
    found = compare(record, alone.logits[0])
    print(f"{record.name}: cosine distance {found.cosine_distance:.1e}, {found.kl:.1e}")
    assert found.cosine_distance < LIMIT
    assert found.kl < LIMIT
    assert list(record.greedy) == alone.tokens
    return alone


def check_batch(
    model: InProcessModel, records: Sequence[Record], alone: Sequence[Generated]
) -> None:
    """Check that prompts of different lengths give in a batch what each gives alone."""
    together = model.generate([record.tokens for record in records], GREEDY_STEPS)
    for record, one, batched in zip(records, alone, together, strict=True):
        found = between(one, batched)
        print(f"{record.name} in a batch: {found.cosine_distance:.1e}, {found.kl:.1e}")
        assert one.tokens == batched.tokens
        assert found.cosine_distance < LIMIT
        assert found.kl < LIMIT


def between(one: Generated, other: Generated) -> Comparison:
    """Compare the logits of two generations, step by step; the worst step counts."""
    left, right = (np.asarray(x.logits, dtype=np.float64) for x in (one, other))
    return Comparison(cosine_distance(left, right), kl_divergence(left, right))
