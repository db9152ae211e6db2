"""Many clients of one server at once; the full form is `scripts/bench_load.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnquant.testing.parity import make_bundle
from attnquant.testing.server import serving_with
from bench_load import Load, make_prompts, make_requests, problems, resident
from gemma3_support import golden
from gemma3_support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GOLDEN = golden.load(ROOT / "attnquant-gemma3" / "tests" / "golden" / "tiny.npz")
SETTING = next(r.setting for r in GOLDEN.records if r.setting.name == "g3-r4-all")
VOCABULARY, WINDOW, LENGTH = 320, 128, 1024
REQUESTS, CLIENTS, ROUNDS, TOKENS = 60, 16, 2, 12


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.exhaustive), 16])
def test_under_load_each_greedy_answer_is_the_one_it_gets_alone(
    tmp_path: Path, batch: int
) -> None:
    checkpoint = write_tiny_checkpoint(
        tmp_path / "tied", **GOLDEN.source("tied").recipe
    )
    bundle = make_bundle(checkpoint, SETTING, tmp_path / "bundle")
    prompts = make_prompts(15, 3 * WINDOW, VOCABULARY, seed=0)
    (fullest,) = make_prompts(1, LENGTH, VOCABULARY, seed=1)
    assert len(prompts[0]) > WINDOW
    assert len(prompts[-1]) == 1
    flags = ("--max-batch-size", str(batch))
    with (
        (tmp_path / "serve.log").open("wb") as log,
        serving_with(bundle, log, *flags) as server,
    ):
        client = server.wait_until_served()
        load = Load(client, str(bundle), prompts)
        whole = Load(client, str(bundle), [fullest])
        before = whole.alone(1)
        expected = load.alone(TOKENS)
        rounds = []
        for i in range(ROUNDS):
            requests = make_requests(REQUESTS, len(prompts), TOKENS, seed=i)
            outcome = load.round(requests, CLIENTS, expected)
            outcome.resident = resident(server.process.pid)
            print(outcome.summary())
            rounds.append(outcome)
        assert problems(rounds) == []
        for outcome in rounds:
            # Not even a tie: these models' likeliest tokens are far apart.
            assert outcome.differences == []
            assert outcome.done.total() == REQUESTS
            assert set(outcome.done) == {"whole", "streamed", "closed", "malformed"}
        # With a page lost, the longest prompt would find no room.
        assert whole.alone(1) == before
