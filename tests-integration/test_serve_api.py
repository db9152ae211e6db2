"""`max serve` on a tiny bundle: the OpenAI-compatible endpoint, as clients see it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from attnquant.testing.parity import make_bundle
from attnquant.testing.server import served
from gemma3_support import golden
from gemma3_support.oracle import forward, substitute_weff
from gemma3_support.tiny import tiny_config, tiny_weights, write_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GOLDEN = golden.load(ROOT / "attnquant-gemma3" / "tests" / "golden" / "tiny.npz")
SETTING = "g3-r4-all"
RECORDS = [
    record
    for record in GOLDEN.records
    if record.source == "tied" and record.setting.name == SETTING
]
WINDOW = next(record for record in RECORDS if record.prompt == "window")
LENGTH = 1024
VOCABULARY = 320
CUT = "\N{REPLACEMENT CHARACTER}"

LOG_PROBABILITY = 5e-3
"""How far MAX's float32 logits of these models are from the records', at most; the
divergence of 1e-5 nats that parity allows is as much. Temperature, a cut to the
likeliest tokens or a soft cap would show as tenths."""

SAMPLING = {"ignore_eos": True, "top_k": -1}
"""All tokens to choose from: the checkpoint's own default is the likeliest alone."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    checkpoint = write_tiny_checkpoint(root / "tied", **GOLDEN.source("tied").recipe)
    return make_bundle(checkpoint, WINDOW.setting, root / "bundle")


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[openai.OpenAI]:
    with (bundle.parent / "serve.log").open("wb") as log, served(bundle, log) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(bundle: Path) -> Any:
    return AutoTokenizer.from_pretrained(bundle)


class Asker:
    """Asks for completions, greedy ones unless told otherwise."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client = client
        self.model = model

    def __call__(
        self, record: golden.Record = WINDOW, tokens: int = 24, **fields: Any
    ) -> Any:
        greedy = {"temperature": 0, "extra_body": {"ignore_eos": True}}
        return self.client.completions.create(
            model=self.model,
            prompt=list(record.tokens),
            max_tokens=tokens,
            **greedy | fields,
        )

    def text(
        self, record: golden.Record = WINDOW, tokens: int = 24, **fields: Any
    ) -> str:
        return str(self(record, tokens, **fields).choices[0].text)

    def post(self, path: str, content: bytes) -> httpx.Response:
        return httpx.post(
            str(self.client.base_url).rstrip("/") + path,
            content=content,
            headers={"content-type": "application/json"},
            timeout=60,
        )


@pytest.fixture
def ask(client: openai.OpenAI, bundle: Path) -> Iterator[Asker]:
    """Give what asks, and make sure that afterwards the server is as it was."""
    asker = Asker(client, str(bundle))
    yield asker
    assert_greedy(asker, AutoTokenizer.from_pretrained(bundle), RECORDS[1])


def assert_greedy(ask: Asker, tokenizer: Any, record: golden.Record) -> None:
    expected = tokenizer.decode(record.greedy, skip_special_tokens=True)
    # Of bytes that end amid a character, MAX's streaming decoder holds some back.
    assert ask.text(record).rstrip(CUT) == expected.rstrip(CUT), record.name


# ------------------------------------------------------------------------ completions


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.prompt)
def test_a_bundle_is_served_greedily_as_recorded(
    ask: Asker, tokenizer: Any, record: golden.Record
) -> None:
    assert_greedy(ask, tokenizer, record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.prompt)
def test_pieces_of_a_stream_join_to_the_whole(
    ask: Asker, record: golden.Record
) -> None:
    chunks = [chunk.choices[0] for chunk in ask(record, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == ask.text(record)
    assert len(chunks) > 1
    reasons = [chunk.finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_text_and_its_tokens_are_answered_alike(ask: Asker, tokenizer: Any) -> None:
    answer = ask.client.completions.create(
        model=ask.model,
        prompt=WINDOW.text,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == ask.text(WINDOW)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(WINDOW.text))


def test_prompts_of_one_request_are_answered_in_order_as_each_alone(
    ask: Asker,
) -> None:
    together = ask.client.completions.create(
        model=ask.model,
        prompt=[list(record.tokens) for record in RECORDS],
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in together.choices] == list(range(len(RECORDS)))
    for choice, record in zip(together.choices, RECORDS, strict=True):
        assert choice.text == ask.text(record), record.name


@pytest.mark.parametrize("tokens", [1, 7, 24])
def test_as_many_tokens_come_as_were_asked_for(ask: Asker, tokens: int) -> None:
    answer = ask(WINDOW, tokens)
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.prompt_tokens == len(WINDOW.tokens)
    assert answer.usage.total_tokens == tokens + len(WINDOW.tokens)
    assert answer.choices[0].finish_reason == "length"
    assert ask.text(WINDOW).startswith(answer.choices[0].text.rstrip(CUT))
    *_, last = ask(WINDOW, tokens, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == tokens


@pytest.mark.parametrize("prompt", [LENGTH - 24, LENGTH - 1])
def test_text_ends_where_the_served_length_is_full(ask: Asker, prompt: int) -> None:
    answer = ask.client.completions.create(
        model=ask.model,
        prompt=[9] * prompt,
        max_tokens=500,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.total_tokens == LENGTH
    assert answer.choices[0].finish_reason == "length"


def test_a_prompt_may_fill_the_served_length(ask: Asker) -> None:
    # MAX answers one token even then.
    answer = ask.client.completions.create(
        model=ask.model, prompt=[9] * LENGTH, max_tokens=5, temperature=0
    )
    assert answer.usage.prompt_tokens == LENGTH
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("stop", ["7777", "veent", ["no such text", "re"]])
@pytest.mark.parametrize("stream", [False, True])
def test_text_stops_after_a_stop_string(
    ask: Asker, stop: str | list[str], stream: bool
) -> None:
    whole = ask.text(WINDOW, 100)
    answer = ask(WINDOW, 100, stop=stop, stream=stream)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    assert choices[-1].finish_reason == "stop"
    found = stop if isinstance(stop, str) else stop[-1]
    # MAX keeps the string, and what its worker has made before it hears of it.
    assert found in text
    assert whole.startswith(text)
    assert len(text) < len(whole) // 2


def test_text_stops_after_a_stop_token(ask: Asker) -> None:
    place = 6
    token = WINDOW.greedy[place]
    assert token not in WINDOW.greedy[:place]
    answer = ask(WINDOW, extra_body={"stop_token_ids": [token]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == place + 1


def test_the_model_is_listed_under_its_path(ask: Asker) -> None:
    (model,) = ask.client.models.list().data
    assert model.id == ask.model
    assert model.model_dump()["max_model_len"] == LENGTH


# --------------------------------------------------------------------------- sampling


def test_a_seed_gives_the_same_text_again_and_another_seed_another(ask: Asker) -> None:
    texts = [
        ask.text(WINDOW, temperature=1, seed=seed, extra_body=SAMPLING)
        for seed in (1, 2, 3, 1, 2, 3)
    ]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3
    assert ask.text(WINDOW) not in texts


def test_without_a_seed_texts_differ(ask: Asker) -> None:
    texts = {ask.text(WINDOW, temperature=1, extra_body=SAMPLING) for _ in range(3)}
    assert len(texts) == 3


def test_a_temperature_near_zero_and_a_single_choice_are_greedy(ask: Asker) -> None:
    greedy = ask.text(WINDOW)
    for fields in (
        {"temperature": 0, "seed": 5},
        {"temperature": 1e-4, "extra_body": SAMPLING},
        {"temperature": 1, "extra_body": SAMPLING | {"top_k": 1}},
        {"temperature": 1, "top_p": 1e-4, "extra_body": SAMPLING},
        # As the checkpoint's generation_config.json has it.
        {"temperature": 1},
    ):
        assert ask.text(WINDOW, **fields) == greedy, fields


def test_a_higher_temperature_gives_less_likely_text(ask: Asker) -> None:
    def mean(temperature: float) -> float:
        answers = [
            ask(temperature=temperature, seed=seed, logprobs=1, extra_body=SAMPLING)
            for seed in range(1, 7)
        ]
        return float(np.mean([a.choices[0].logprobs.token_logprobs for a in answers]))

    means = [mean(temperature) for temperature in (0.2, 1.0, 2.0)]
    print(f"mean log-probabilities at temperatures 0.2, 1, 2: {means}")
    assert means == sorted(means, reverse=True)


# ------------------------------------------------------------------ log-probabilities


def log_softmax(logits: Any) -> Any:
    wide = np.asarray(logits, dtype=np.float64)
    return wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def oracle() -> Callable[[Sequence[int]], Any]:
    """What gives the log-probabilities after each token of a text, in float64."""
    recipe = dict(GOLDEN.source("tied").recipe or {})
    seed = recipe.pop("seed", 0)
    config = tiny_config(**recipe)
    setting = WINDOW.setting
    assert setting.shared_blocks is not None
    weights = substitute_weff(
        tiny_weights(config, seed),
        setting.rank,
        setting.shared_blocks,
        setting.families,
    )
    return lambda tokens: log_softmax(forward(weights, config, tokens))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.prompt)
def test_log_probabilities_are_those_of_the_logits(
    ask: Asker, oracle: Callable[[Sequence[int]], Any], record: golden.Record
) -> None:
    expected = oracle([*record.tokens, *record.greedy[:-1]])[len(record.tokens) - 1 :]
    assert np.argmax(expected, axis=1).tolist() == list(record.greedy)
    found = ask(record, logprobs=5).choices[0].logprobs
    chosen = expected[np.arange(len(record.greedy)), record.greedy]
    print(f"off by {np.abs(chosen - found.token_logprobs).max():.1e} at most")
    assert found.token_logprobs == pytest.approx(chosen, abs=LOG_PROBABILITY)
    # The first step's again, from the record.
    first = log_softmax(record.logits[-1])[record.greedy[0]]
    assert found.token_logprobs[0] == pytest.approx(first, abs=LOG_PROBABILITY)
    for step, top in zip(expected, found.top_logprobs, strict=True):
        # By text, which several tokens may share, of which MAX keeps one.
        likeliest = np.sort(step)[::-1][:6]
        for value in top.values():
            assert np.abs(likeliest - value).min() < LOG_PROBABILITY


def test_log_probabilities_do_not_depend_on_how_a_token_was_chosen(
    ask: Asker, oracle: Callable[[Sequence[int]], Any]
) -> None:
    expected = oracle(WINDOW.tokens)[-1]
    for seed in range(1, 5):
        answer = ask(
            WINDOW,
            tokens=1,
            temperature=2,
            seed=seed,
            logprobs=7,
            extra_body=SAMPLING | {"return_token_ids": True},
        )
        (token,) = answer.choices[0].model_dump()["token_ids"]
        found = answer.choices[0].logprobs
        assert found.token_logprobs[0] == pytest.approx(
            expected[token], abs=LOG_PROBABILITY
        )


def test_a_stream_has_the_log_probabilities_of_the_whole(ask: Asker) -> None:
    whole = ask(WINDOW, logprobs=3).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in ask(WINDOW, logprobs=3, stream=True)]
    streamed = [value for part in parts for value in part.token_logprobs]
    assert streamed == whole.token_logprobs
    assert [top for part in parts for top in part.top_logprobs] == whole.top_logprobs


# ------------------------------------------------------------------------------- chat

MESSAGES: Any = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Germany?"},
]


@pytest.fixture
def rendered(tokenizer: Any) -> list[int]:
    """`MESSAGES` as the model sees them."""
    text = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_a_chat_is_the_completion_of_its_rendered_text(
    ask: Asker, rendered: list[int]
) -> None:
    plain = ask.client.completions.create(
        model=ask.model,
        prompt=rendered,
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    fields: Any = {
        "model": ask.model,
        "messages": MESSAGES,
        "max_tokens": 16,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    answer = ask.client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    stream = ask.client.chat.completions.create(**fields, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == plain.choices[0].text


def test_the_likeliest_tokens_of_a_chat_are_all_there(
    ask: Asker, rendered: list[int], oracle: Callable[[Sequence[int]], Any]
) -> None:
    answer = ask.client.chat.completions.create(
        model=ask.model,
        messages=MESSAGES,
        max_tokens=1,
        temperature=0,
        logprobs=True,
        top_logprobs=7,
    )
    (found,) = answer.choices[0].logprobs.content
    likeliest = np.sort(oracle(rendered)[-1])[::-1]
    assert found.logprob == pytest.approx(likeliest[0], abs=LOG_PROBABILITY)
    assert [top.logprob for top in found.top_logprobs] == pytest.approx(
        likeliest[:7].tolist(), abs=LOG_PROBABILITY
    )


# ---------------------------------------------------------------------- refused, 4xx

PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def image(url: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a prompt too long": ({"prompt": [9] * (LENGTH + 1)}, "1025 tokens.*1024"),
    "a text too long": ({"prompt": "xyz " * LENGTH}, "tokens.*1024"),
    "one of two too long": ({"prompt": [[9], [9] * 2000]}, "2000 tokens.*1024"),
    "a token too large": ({"prompt": [9, VOCABULARY]}, "token 1 is 320.*0 to 319"),
    "a token below zero": ({"prompt": [-1]}, "token 0 is -1.*0 to 319"),
    "a token of 71 bits": ({"prompt": [2**70]}, "token 0 is 1180591620717411303424"),
    "no prompt": ({"prompt": None}, "prompt"),
    "a number as prompt": ({"prompt": 5}, "prompt"),
    "text among tokens": ({"prompt": [1, "a"]}, "prompt"),
    "fractions as tokens": ({"prompt": [1.5]}, "prompt"),
    "max_tokens in words": ({"max_tokens": "many"}, "max_tokens"),
    "max_tokens of 71 bits": ({"max_tokens": 2**70}, "max_tokens is"),
    "temperature in words": ({"temperature": "hot"}, "temperature"),
    "top_k beyond the vocabulary": (
        {"temperature": 1, "top_k": 2**31},
        "top_k is.*320 tokens",
    ),
    "seed in words": ({"seed": "x"}, "seed"),
    "seed of 71 bits": ({"seed": 2**70}, "seed is"),
    "stop that is no text": ({"stop": 5}, "stop"),
    "too many logprobs": ({"logprobs": 100}, r"logprobs.*\[0, 7\]"),
    "logprobs below zero": ({"logprobs": -1}, r"logprobs.*\[0, 7\]"),
    "logprobs of the prompt": ({"echo": True, "logprobs": 1}, "--enable-echo"),
    "an unknown field": ({"nonsense": 1}, "nonsense"),
}

REFUSED_WITHOUT_WHY: dict[str, dict[str, Any]] = {
    "an unknown model": {"model": "no-such-model"},
    "an empty prompt": {"prompt": ""},
    "an empty list of tokens": {"prompt": [[]]},
    "max_tokens below zero": {"max_tokens": -1},
    "temperature below zero": {"temperature": -1},
    "an infinite temperature": {"temperature": float("inf")},
    "top_p above one": {"top_p": 2},
    "top_k below minus one": {"top_k": -5},
    "min_p above one": {"min_p": 2},
    "a penalty of nothing": {"repetition_penalty": 0},
    "an endpoint that is not there": {"target_endpoint": "x"},
}
"""MAX writes the reason to its log, and answers `Value error.`"""

REFUSED_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (image(PNG), "image_url content type not supported"),
    "an image elsewhere": (image("http://127.0.0.1:9/x.png"), "image_url"),
    "no messages": ({"messages": None}, "messages"),
    "an empty list of messages": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "x", "content": ""}]}, "role"),
    "messages too long": (
        {"messages": [{"role": "user", "content": "xyz " * LENGTH}]},
        "tokens.*1024",
    ),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 100}, r"\[0, 7\]"),
    "a shape of answer": (
        {"response_format": {"type": "json_object"}},
        "--enable-structured-output",
    ),
}

MALFORMED = {
    "half an object": b'{"model": "x", ',
    "nothing": b"",
    "no JSON": b"Hello?",
    "no object": b"[1, 2]",
    "no UTF-8": b'{"model": "\xff"}',
    "an object without fields": b"{}",
}


FAILED_BY_MAX: dict[str, tuple[str, dict[str, Any]]] = {
    "no prompts": ("/completions", {"prompt": []}),
    "a stream of two": ("/completions", {"prompt": ["a", "b"], "stream": True}),
    "embeddings": ("/embeddings", {"input": "x"}),
}
"""What MAX 26.7's routes answer with 500, before any code of an architecture runs."""


def check_refused(response: httpx.Response, message: str = ".") -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(message, error["message"], re.DOTALL), error["message"]


def body(ask: Asker, **fields: Any) -> bytes:
    return json.dumps({"model": ask.model, "max_tokens": 3} | fields).encode()


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_with_why(ask: Asker, name: str) -> None:
    fields, message = REFUSED[name]
    check_refused(
        ask.post("/completions", body(ask, **{"prompt": "x"} | fields)), message
    )


@pytest.mark.parametrize("name", REFUSED_WITHOUT_WHY)
def test_a_bad_request_is_refused(ask: Asker, name: str) -> None:
    fields = {"prompt": "x"} | REFUSED_WITHOUT_WHY[name]
    check_refused(ask.post("/completions", body(ask, **fields)))


@pytest.mark.parametrize("name", REFUSED_CHATS)
def test_a_bad_chat_is_refused_with_why(ask: Asker, name: str) -> None:
    fields, message = REFUSED_CHATS[name]
    fields = {"messages": [{"role": "user", "content": "hi"}]} | fields
    check_refused(ask.post("/chat/completions", body(ask, **fields)), message)


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_request_is_refused(ask: Asker, path: str, name: str) -> None:
    check_refused(ask.post(path, MALFORMED[name]))


def test_a_refused_stream_is_refused_before_it_begins(ask: Asker) -> None:
    fields = {"prompt": [9] * (LENGTH + 1), "stream": True}
    check_refused(ask.post("/completions", body(ask, **fields)), "1025 tokens")


def test_the_client_sees_a_refusal_as_such(ask: Asker) -> None:
    with pytest.raises(openai.BadRequestError, match="token 0 is 320"):
        ask.client.completions.create(model=ask.model, prompt=[VOCABULARY])


def test_a_path_that_is_none_is_not_found(ask: Asker) -> None:
    assert ask.post("/nothing", b"{}").status_code == 404


@pytest.mark.parametrize("name", FAILED_BY_MAX)
def test_what_max_itself_fails_on_does_not_end_the_server(
    ask: Asker, name: str
) -> None:
    path, fields = FAILED_BY_MAX[name]
    asked = json.dumps({"model": ask.model} | fields).encode()
    assert ask.post(path, asked).status_code == 500
