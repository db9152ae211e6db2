"""The golden file format: what is written is read, and estimates estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from attnquant.testing.metrics import cosine_distance, kl_divergence
from gemma3_support import golden

FOLDER: Final = Path(__file__).parent / "golden"
FILES: Final = ("tiny.npz", "gemma3-270m.npz")
VOCAB: Final = 60_000


def noise(rows: int, seed: int) -> npt.NDArray[np.float32]:
    """Return values of unit variance, `[rows, VOCAB]`."""
    words = np.random.PCG64(seed).random_raw(rows * VOCAB)
    uniform = words.astype(np.float64) / 2.0**64
    values = (uniform - 0.5) * np.sqrt(12.0)
    return np.asarray(values.reshape(rows, VOCAB), dtype=np.float32)


def record_of(logits: npt.NDArray[np.float32], *, sampled: bool) -> golden.Record:
    ids, weights, kept = None, np.ones(VOCAB), logits
    if sampled:
        top = golden.top_ids(logits[0])
        ids, weights = golden.sampled_columns(top, golden.draw_ids(VOCAB), VOCAB)
        kept = logits[:, ids]
    return golden.Record(
        source="made up",
        setting=golden.Setting("g3-r4-attn", 3, 4, "attn"),
        prompt="short",
        text="Grüße",
        tokens=tuple(range(max(len(logits), 3))),
        greedy=(7, 8),
        continuation="!",
        smallest_margin=0.5,
        vocab_size=VOCAB,
        rows="last" if len(logits) == 1 else "all",
        ids=ids,
        weights=weights,
        logits=kept,
        log_total=golden.log_sum_exp(logits),
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_a_record_survives_the_file(tmp_path: Path, *, sampled: bool) -> None:
    record = record_of(noise(1, 0), sampled=sampled)
    drawn = golden.draw_ids(VOCAB) if sampled else None
    source = golden.Source("made up", "0" * 64, {"seed": 3})
    path = tmp_path / "made-up.npz"
    golden.save(path, golden.Golden((source,), {"torch": "2"}, drawn, (record,)))
    back = golden.load(path)
    assert (source,) == back.sources
    assert back.versions == {"torch": "2"}
    for name in golden.Record.__dataclass_fields__:
        expected: Any = getattr(record, name)
        np.testing.assert_array_equal(expected, getattr(back.records[0], name))


@pytest.mark.parametrize("sampled", [False, True])
def test_equal_logits_are_at_distance_zero(*, sampled: bool) -> None:
    logits = noise(1, 0) * 3
    assert golden.compare(record_of(logits, sampled=sampled), logits) == (0.0, 0.0)


def test_a_full_record_compares_as_the_metrics_do() -> None:
    logits = noise(3, 0)
    other = logits + noise(3, 1) * np.array([[0.1], [0.3], [0.2]], dtype=np.float32)
    got = golden.compare(record_of(logits, sampled=False), other)
    expected = (cosine_distance(logits, other), kl_divergence(logits, other))
    assert expected == pytest.approx(got, rel=1e-9)


@pytest.mark.parametrize("size", [1e-5, 1e-2, 1.0])
def test_a_sampled_record_estimates_what_the_metrics_say(size: float) -> None:
    logits = noise(1, 0) * 3
    other = logits + noise(1, 1) * np.float32(size)
    got = golden.compare(record_of(logits, sampled=True), other)
    expected = (cosine_distance(logits, other), kl_divergence(logits, other))
    assert expected == pytest.approx(got, rel=0.05)


def test_a_single_row_is_compared_with_the_last_position() -> None:
    logits = noise(3, 0)
    record = record_of(logits, sampled=False)
    assert golden.compare(record, logits[-1]) == (0.0, 0.0)
    assert golden.compare(record, logits[0]).kl > 0.5


def test_logits_of_another_shape_are_refused() -> None:
    record = record_of(noise(3, 0), sampled=False)
    with pytest.raises(ValueError, match="2 rows of logits for 3 tokens"):
        golden.compare(record, noise(2, 0))
    for sampled in (False, True):
        record = record_of(noise(1, 0), sampled=sampled)
        with pytest.raises(ValueError, match="vocabulary of 59999, expected 60000"):
            golden.compare(record, noise(1, 0)[:, 1:])


@pytest.mark.parametrize("name", FILES)
def test_recorded_greedy_tokens_do_not_hang_on_rounding(name: str) -> None:
    records = golden.load(FOLDER / name).records
    assert min(record.smallest_margin for record in records) >= 1e-3


@pytest.mark.parametrize("name", FILES)
def test_every_source_has_every_prompt_under_three_settings(name: str) -> None:
    file = golden.load(FOLDER / name)
    for source in file.sources:
        ours = [record for record in file.records if record.source == source.name]
        prompts = {record.prompt for record in ours}
        assert {"short", "word", "code", "japanese", "window", "longer"} <= prompts
        assert len({record.setting.name for record in ours}) == 3
        assert len(ours) == 3 * len(prompts)


@pytest.mark.parametrize("name", FILES)
def test_a_file_stays_small_enough_for_git(name: str) -> None:
    assert (FOLDER / name).stat().st_size < 3_000_000
