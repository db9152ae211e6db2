"""Tests of the parts of the serving benchmark that need no model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

# scripts/ is no package, and pytest's importlib mode leaves it off the path.
sys.path.insert(0, str(Path(__file__).parent))

import bench_serving as bench
from attnquant.theta.bundle import BundleInfo, Source
from attnquant.theta.families import FAMILIES
from attnquant.theta.layout import make_layout
from attnquant.theta.names import ProjectionKey

LAYERS, WIDTH, RANK, VOCABULARY = 6, 8, 2, 100


def info(blocks: int) -> BundleInfo:
    """Return the block of a bundle whose projections are all of one square shape."""
    shapes = {
        ProjectionKey(layer, family): (WIDTH, WIDTH)
        for layer in range(LAYERS)
        for family in FAMILIES
    }
    layout = make_layout(
        shapes, num_layers=LAYERS, shared_blocks=blocks, lora_rank=RANK
    )
    kept = {"embed_tokens.weight": ("bfloat16", (VOCABULARY, WIDTH))}
    return BundleInfo("mean-svd", layout, "float32", kept, Source("x", {}), {}, {})


def test_every_number_of_requests_and_length_is_measured() -> None:
    asked = bench.measures(steps=16)

    decode = [m for m in asked if m.tokens > 1]
    prefill = [m for m in asked if m.tokens == 1]
    assert [m.requests for m in decode] == [1, 2, 4, 8, 16]
    assert [m.length for m in prefill] == [32, 128, 512]
    assert decode[0].tokens == 17
    assert len({m.name for m in asked}) == len(asked)
    assert all(m.length + m.tokens <= bench.MAX_LENGTH for m in asked)


class Recorder:
    """Stands in for a worker; answers what a step of known length would."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def ask(self, method: str, *arguments: object) -> object:
        """Note what is asked."""
        self.asked.append((method, *arguments))
        return 0.5, 0.25


def test_a_decode_measure_is_the_time_of_a_step_and_a_prefill_of_the_first() -> None:
    worker = Recorder()

    step = bench.Measure("d", 4, 32, 9).seconds(worker)
    first = bench.Measure("p", 1, 128, 1).seconds(worker)

    assert (step, first) == (0.25, 0.5)
    (_, decoded, tokens), (_, filled, one) = worker.asked
    assert np.array(decoded).shape == (4, 32)
    assert np.array(filled).shape == (1, 128)
    assert (tokens, one) == (9, 1)


def test_all_cases_get_the_same_prompts() -> None:
    workers = Recorder(), Recorder()
    measure = bench.Measure("d", 2, 8, 3)

    for worker in workers:
        measure.seconds(worker)

    assert workers[0].asked == workers[1].asked


def test_rates_count_the_tokens_of_all_requests() -> None:
    assert bench.Measure("d", 8, 32, 3).rate(0.5) == 16
    assert bench.Measure("p", 1, 128, 1).rate(0.5) == 256


def test_a_ratio_above_one_is_faster_than_the_baseline() -> None:
    assert bench.ratios({"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0}) == {
        "a": 3.0,
        "b": 0.5,
    }


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2], [1, 2, 3], 2),
        ([1, 9], [1, 2], 1),
        ([], [1], 0),
    ],
)
def test_texts_agree_up_to_the_first_token_that_differs(
    left: list[int], right: list[int], count: int
) -> None:
    assert bench.common_prefix(left, right) == count


def test_sharing_is_predicted_from_the_bytes_that_are_read() -> None:
    matrix, families = WIDTH * WIDTH, len(FAMILIES)
    factors = LAYERS * families * (2 * WIDTH * RANK + RANK)
    head = VOCABULARY * WIDTH
    before = LAYERS * families * matrix + head
    after = families * matrix + factors + head
    cached = (LAYERS - 1) * families * matrix

    predicted = bench.prediction(info(LAYERS), info(1))

    assert predicted["times_faster"] == pytest.approx(before / after)
    assert predicted["share_of_layer_bytes_in_cache"] == pytest.approx(
        cached / (cached + families * matrix + factors)
    )


def test_nothing_stays_in_cache_where_nothing_is_shared() -> None:
    predicted = bench.prediction(info(LAYERS), info(LAYERS))

    assert predicted == {"times_faster": 1.0, "share_of_layer_bytes_in_cache": 0.0}


def figures(step: float) -> dict[str, object]:
    names = [measure.name for measure in bench.measures(16)]
    return {
        "seconds": dict.fromkeys(names, step),
        "times_faster": dict.fromkeys(names, 1 / step),
        "memory_at_the_end": {"resident": 1_500_000_000},
        "same_tokens": 12,
    }


def test_sharing_is_measured_against_the_same_case_at_passthrough() -> None:
    report = {
        "dense": figures(1.0),
        "fused float32": figures(0.5),
        "fused float32, G=1 r=16": figures(0.25),
        "gemm, G=1 r=16": figures(0.3),
    }

    assert bench.sharing(report) == {"fused float32, G=1 r=16": 2.0}


def test_table_and_pictures_have_every_case() -> None:
    report = {"dense": figures(1.0), "fused float32": figures(0.5)}

    lines = bench.table(report).splitlines()

    assert [line.split("  ")[0] for line in lines[1:]] == list(report)
    assert "1.5 GB" in lines[1]
    assert "12/16" in lines[1]
    for panel in bench.panels(report):
        assert panel.labels == list(report)


def test_memory_is_read_in_bytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t 30 kB\nVmRSS:\t 20 kB\nRssFile:\t 10 kB\n")

    assert bench.memory(status) == {
        "peak": 30 * 1024,
        "resident": 20 * 1024,
        "of_files": 10 * 1024,
    }


def test_memory_is_that_of_this_process() -> None:
    found = bench.memory()

    # What else is freed meanwhile is not known, so a growth cannot be asked for.
    assert 0 < found["resident"] <= found["peak"]


def test_a_worker_that_cannot_load_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = bench.Case("the one", "llama.cpp", tmp_path / "none.gguf")
    worker = bench.Worker(case)

    with pytest.raises(RuntimeError, match="the one: its process ended"):
        worker.wait()

    worker.close()
    assert "Error" in capfd.readouterr().err
