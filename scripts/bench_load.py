"""`max serve` under load: many clients at once, some who hang up, some who babble.

Rounds of requests are sent by clients at once: greedy ones of all lengths, whole and
streamed, streams that are closed midway, and requests that are none. Each greedy answer
is compared with the one its prompt gets alone, token by token; where two part, the gap
between the two likeliest tokens says whether it was a tie. Memory of the server and its
workers is read after each round, and at last a prompt as long as the server takes is
sent, which it can only answer if no page of the cache was lost.

    python scripts/bench_load.py BUNDLE --vocabulary 262144 --window 512
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai

from attnquant.testing.server import serving_with
from benching import write_report

Kind = Literal["whole", "streamed", "closed", "malformed"]

SHARES: Mapping[Kind, float] = {
    "whole": 0.45,
    "streamed": 0.25,
    "closed": 0.15,
    "malformed": 0.15,
}
ORDINARY = 10
"""Tokens below this are special."""

CLOSED_TOKENS = 200
"""How much is asked for by who hangs up: far more than comes before."""

TIE = 1e-3
"""Nats between the two likeliest tokens, below which float32 sums in another order may
choose the other."""

GROWTH = 0.05
"""How much memory may grow from the first round to the last, as a share."""

BAD = (
    b"",
    b'{"model": ',
    b"[]",
    b'{"prompt": "x"}',
    b'{"model": "no-such-model", "prompt": "x"}',
    b'{"model": MODEL, "prompt": 5}',
    b'{"model": MODEL, "prompt": [-1]}',
    b'{"model": MODEL, "prompt": "x", "max_tokens": -1}',
    b'{"model": MODEL, "prompt": "x", "temperature": "hot"}',
)


@dataclass(frozen=True)
class Request:
    """What a client sends.

    Attributes:
        kind: What the client does with the answer.
        prompt: Which prompt, or which of `BAD`.
        tokens: How many are asked for.
        read: How many pieces are read before the stream is closed.
    """

    kind: Kind
    prompt: int
    tokens: int = 0
    read: int = 0


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        tokens: Their ids.
        gaps: Nats between the two likeliest tokens of each step.
    """

    tokens: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Difference:
    """A greedy answer that is not the one its prompt gets alone.

    Attributes:
        prompt: Which.
        length: Tokens of the prompt.
        step: Where the two part.
        gap: Nats between the two likeliest tokens there.
    """

    prompt: int
    length: int
    step: int
    gap: float


@dataclass
class Round:
    """What a round of requests came to.

    Attributes:
        seconds: From first to last.
        resident: Bytes of the server and its workers afterwards.
        done: How many ended as they should, by kind.
        differences: Greedy answers that are not the expected ones.
        failures: What else went wrong, in words; a request that got stuck among them.
        latency: Seconds of each greedy request.
    """

    seconds: float = 0.0
    resident: int = 0
    done: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return it for a report."""
        quantiles = np.quantile(self.latency or [0.0], [0.5, 0.95, 1.0])
        return {
            "seconds": self.seconds,
            "resident": self.resident,
            "done": dict(self.done),
            "differences": [asdict(difference) for difference in self.differences],
            "failures": self.failures,
            "latency_median_p95_max": quantiles.tolist(),
        }


def make_prompts(
    count: int, longest: int, vocabulary: int, seed: int
) -> list[list[int]]:
    """Return random prompts of 1 to `longest` tokens, of every order of length."""
    rng = np.random.default_rng(seed)
    lengths = np.geomspace(longest, 1, count).round().astype(int)
    return [rng.integers(ORDINARY, vocabulary, n).tolist() for n in lengths]


def make_requests(count: int, prompts: int, tokens: int, seed: int) -> list[Request]:
    """Return requests of all kinds, in `SHARES`, in a random order.

    Args:
        count: How many.
        prompts: How many prompts there are; each is used about as often.
        tokens: The most that a greedy request asks for.
        seed: Of the order and the choices.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        kind = _kind((i + 0.5) / count)
        prompt = i % (len(BAD) if kind == "malformed" else prompts)
        asked = CLOSED_TOKENS if kind == "closed" else int(rng.integers(1, tokens + 1))
        requests.append(Request(kind, prompt, asked, int(rng.integers(0, 5))))
    return [requests[i] for i in rng.permutation(count)]


def _kind(place: float) -> Kind:
    edge = 0.0
    for kind, share in SHARES.items():
        edge += share
        if place < edge:
            return kind
    return "malformed"


class Load:
    """Clients of one server."""

    def __init__(
        self, client: openai.OpenAI, model: str, prompts: Sequence[Sequence[int]]
    ) -> None:
        """Note whom to ask what.

        Args:
            client: Of the server; its time limit is what a stuck request is told by.
            model: The name it is served under.
            prompts: Token ids.
        """
        self.client = client
        self.model = model
        self.prompts = prompts

    def alone(self, tokens: int) -> list[Answer]:
        """Ask for each prompt's greedy answer, one after another."""
        return [self._answer(i, tokens) for i in range(len(self.prompts))]

    def round(
        self, requests: Sequence[Request], clients: int, expected: Sequence[Answer]
    ) -> Round:
        """Send requests from clients at once.

        Args:
            requests: In the order in which they are taken.
            clients: How many threads send them.
            expected: Each prompt's answer alone, at least as long as is asked for.
        """
        outcome = Round()
        waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)
        threads = [
            threading.Thread(target=self._client, args=(waiting, expected, outcome))
            for _ in range(clients)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _client(
        self,
        waiting: queue.SimpleQueue[Request],
        expected: Sequence[Answer],
        outcome: Round,
    ) -> None:
        while True:
            try:
                request = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._send(request, expected, outcome)
            except (openai.OpenAIError, httpx.HTTPError) as error:
                outcome.failures.append(f"{request}: {error!r}")
            else:
                outcome.done[request.kind] += 1

    def _send(
        self, request: Request, expected: Sequence[Answer], outcome: Round
    ) -> None:
        if request.kind == "malformed":
            status = self._babble(BAD[request.prompt])
            if status != httpx.codes.BAD_REQUEST:
                outcome.failures.append(f"{request}: status {status}")
            return
        if request.kind == "closed":
            self._hang_up(request)
            return
        started = time.perf_counter()
        if request.kind == "whole":
            tokens = self._answer(request.prompt, request.tokens).tokens
        else:
            tokens = self._stream(request)
        outcome.latency.append(time.perf_counter() - started)
        whole = expected[request.prompt]
        if tokens != whole.tokens[: request.tokens]:
            step = _parts(tokens, whole.tokens)
            length = len(self.prompts[request.prompt])
            gap = whole.gaps[step] if step < len(whole.gaps) else float("inf")
            outcome.differences.append(Difference(request.prompt, length, step, gap))

    def _fields(self, prompt: int, tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(self.prompts[prompt]),
            "max_tokens": tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }

    def _answer(self, prompt: int, tokens: int) -> Answer:
        # Log-probabilities come by text, which tokens may share, so that the second
        # likeliest may be hidden. The gap is then that to a later one: too large.
        answer = self.client.completions.create(
            **self._fields(prompt, tokens), logprobs=5
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None
        ids = (choice.model_extra or {})["token_ids"]
        return Answer(list(ids), [_gap(top) for top in choice.logprobs.top_logprobs])

    def _stream(self, request: Request) -> list[int]:
        stream = self.client.completions.create(
            **self._fields(request.prompt, request.tokens), stream=True
        )
        found: list[int] = []
        for chunk in stream:
            for choice in chunk.choices:
                found += (choice.model_extra or {}).get("token_ids") or []
        return found

    def _hang_up(self, request: Request) -> None:
        stream = self.client.completions.create(
            **self._fields(request.prompt, request.tokens), stream=True
        )
        with stream:
            for _, _ in zip(range(request.read), stream, strict=False):
                pass

    def _babble(self, content: bytes) -> int:
        content = content.replace(b"MODEL", json.dumps(self.model).encode())
        url = f"{str(self.client.base_url).rstrip('/')}/completions"
        headers = {"content-type": "application/json"}
        return httpx.post(url, content=content, headers=headers, timeout=60).status_code


def _gap(top: Mapping[str, float]) -> float:
    first, *others = sorted(top.values(), reverse=True)
    return first - others[0] if others else float("inf")


def _parts(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def resident(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the resident bytes of a process and all its descendants, summed."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for status in proc.glob("[0-9]*/status"):
        try:
            text = status.read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        child = int(status.parent.name)
        children.setdefault(int(fields["PPid"]), []).append(child)
        sizes[child] = 1024 * int(fields.get("VmRSS", "0 kB").split()[0])
    total, pending = 0, [pid]
    while pending:
        found = pending.pop()
        total += sizes.get(found, 0)
        pending += children.get(found, [])
    return total


def problems(rounds: Sequence[Round]) -> list[str]:
    """Return what is wrong after all rounds, in words; nothing if all is well."""
    found = [failure for outcome in rounds for failure in outcome.failures]
    found += [
        f"a wrong answer: {difference}"
        for outcome in rounds
        for difference in outcome.differences
        if difference.gap > TIE
    ]
    first, last = rounds[0].resident, rounds[-1].resident
    if last > first * (1 + GROWTH):
        found.append(f"memory grew from {first} to {last} bytes")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a bundle, load it, and say what came of it."""
    options = _options(arguments)
    prompts = make_prompts(
        options.requests // 4, options.window * 3 // 2, options.vocabulary, seed=0
    )
    (fullest,) = make_prompts(1, options.max_length, options.vocabulary, seed=1)
    flags = ["--max-length", str(options.max_length)]
    flags += ["--max-batch-size", str(options.max_batch_size)]
    environ = {}
    if options.formulation:
        environ["ATTNQUANT_FORMULATION"] = options.formulation
    with (
        tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log,
        serving_with(options.bundle, log, *flags, environ=environ) as server,
    ):
        print(f"the server's log: {log.name}")
        client = server.wait_until_served()
        load = Load(client, str(options.bundle), prompts)
        whole = Load(client, str(options.bundle), [fullest])
        (before,) = whole.alone(1)
        started = time.perf_counter()
        expected = load.alone(options.tokens)
        print(f"{len(prompts)} prompts alone: {time.perf_counter() - started:.0f} s")
        rounds = []
        for i in range(options.rounds):
            requests = make_requests(
                options.requests, len(prompts), options.tokens, seed=i
            )
            outcome = load.round(requests, options.clients, expected)
            outcome.resident = resident(server.process.pid)
            rounds.append(outcome)
            print(json.dumps(outcome.summary(), indent=2))
        (after,) = whole.alone(1)
    wrong = problems(rounds)
    if before.tokens != after.tokens:
        wrong.append("the longest prompt is answered otherwise than before")
    report = {
        "bundle": options.bundle.name,
        "max_batch_size": options.max_batch_size,
        "max_length": options.max_length,
        "longest_prompt": len(prompts[0]),
        "clients": options.clients,
        "rounds": [outcome.summary() for outcome in rounds],
        "problems": wrong,
    }
    print(write_report(options.out, options.name, report))
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--name", default="bench_load", help="of the report")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--window", type=int, required=True, help="sliding window")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="the most asked for")
    parser.add_argument("--formulation", help="by default the bundle's")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
