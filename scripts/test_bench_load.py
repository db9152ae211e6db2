"""What the load benchmark tells right from wrong by."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bench_load import (
    SHARES,
    TIE,
    Difference,
    Round,
    make_prompts,
    make_requests,
    problems,
    resident,
)


def test_prompts_are_of_every_order_of_length_and_the_same_each_time() -> None:
    prompts = make_prompts(20, 700, 320, seed=0)
    lengths = [len(prompt) for prompt in prompts]
    assert lengths[0] == 700
    assert lengths[-1] == 1
    assert lengths == sorted(lengths, reverse=True)
    assert all(10 <= token < 320 for prompt in prompts for token in prompt)
    assert prompts == make_prompts(20, 700, 320, seed=0)


def test_requests_are_of_all_kinds_in_their_shares() -> None:
    requests = make_requests(200, 50, 16, seed=0)
    kinds = Counter(request.kind for request in requests)
    assert kinds == {kind: round(200 * share) for kind, share in SHARES.items()}
    greedy = [r for r in requests if r.kind in {"whole", "streamed"}]
    assert {request.prompt for request in greedy} == set(range(50))
    assert all(1 <= request.tokens <= 16 for request in greedy)
    assert requests != make_requests(200, 50, 16, seed=1)


def test_a_wrong_answer_is_a_problem_and_a_tie_is_none() -> None:
    tied = Round(differences=[Difference(prompt=1, length=9, step=2, gap=TIE / 2)])
    assert problems([tied]) == []
    wrong = Round(differences=[Difference(prompt=1, length=9, step=2, gap=TIE * 2)])
    (problem,) = problems([tied, wrong])
    assert "prompt=1" in problem


def test_a_failed_request_and_growing_memory_are_problems() -> None:
    rounds = [Round(resident=1000), Round(resident=1040, failures=["stuck"])]
    assert problems(rounds) == ["stuck"]
    (problem,) = problems([Round(resident=1000), Round(resident=1060)])
    assert "1060" in problem


def test_memory_is_that_of_a_process_and_all_its_descendants(tmp_path: Path) -> None:
    for pid, parent, size in ((10, 1, 5), (11, 10, 7), (12, 11, 11), (13, 1, 100)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(f"PPid:\t{parent}\nVmRSS:\t {size} kB\n")
    # One that is being taken down has no size any more.
    (tmp_path / "14").mkdir()
    (tmp_path / "14" / "status").write_text("PPid:\t10\nState:\tZ\n")
    assert resident(10, tmp_path) == (5 + 7 + 11) * 1024


def test_no_memory_is_counted_of_a_process_that_is_none(tmp_path: Path) -> None:
    assert resident(10, tmp_path) == 0
