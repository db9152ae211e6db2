"""The golden file: what is written is read, and what is recorded is fit for use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gemma4_support import golden

PATH: Final = Path(__file__).parent / "golden" / "tiny.npz"
RECORD: Final = golden.Record(
    source="made up",
    setting=golden.Setting("g3-r4-attn", 3, 4, "attn"),
    prompt="short",
    text="Grüße",
    tokens=(1, 2, 3),
    greedy=(7, 8),
    smallest_margin=0.5,
    logits=np.arange(12, dtype=np.float32).reshape(3, 4),
)


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    source = golden.Source("made up", "0" * 64, {"seed": 3})
    path = tmp_path / "made-up.npz"
    golden.save(path, golden.Golden((source,), {"torch": "2"}, (RECORD,)))
    back = golden.load(path)
    assert (source,) == back.sources
    assert back.versions == {"torch": "2"}
    for name in golden.Record.__dataclass_fields__:
        expected: Any = getattr(RECORD, name)
        np.testing.assert_array_equal(expected, getattr(back.records[0], name))


def test_a_single_row_is_compared_with_the_last_position() -> None:
    assert golden.compare(RECORD, RECORD.logits[-1]) == (0.0, 0.0)
    assert golden.compare(RECORD, RECORD.logits[0][::-1]).kl > 0.5


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 3 tokens"):
        golden.compare(RECORD, RECORD.logits[:2])
    with pytest.raises(ValueError, match="vocabulary of 3, expected 4"):
        golden.compare(RECORD, RECORD.logits[:, 1:])


def test_recorded_greedy_tokens_do_not_hang_on_rounding() -> None:
    assert min(r.smallest_margin for r in golden.load(PATH).records) >= 1e-3


def test_every_source_has_every_prompt_under_two_settings() -> None:
    file = golden.load(PATH)
    for source in file.sources:
        ours = [record for record in file.records if record.source == source.name]
        prompts = {record.prompt for record in ours}
        assert prompts == {"short", "word", "japanese", "edge", "window", "longer"}
        assert len({record.setting.name for record in ours}) == 2
        assert len(ours) == 2 * len(prompts)


def test_the_file_stays_small_enough_for_git() -> None:
    assert PATH.stat().st_size < 2_000_000
