"""`max generate` and `max serve` of a tiny multimodal bundle, as users see them."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from attnquant.testing.parity import make_bundle
from attnquant.testing.server import environment, flags, served
from gemma4_support import golden
from gemma4_support.vision import png, write_multimodal_checkpoint

pytestmark = pytest.mark.slow

BIN: Final = Path(sys.executable).parent
GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
SOURCE, SETTING = "pattern", "g4-r4-all"
RECORDS: Final = GOLDEN.of(SOURCE, SETTING)
CUT: Final = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    # A vision tower beside the decoder of the records.
    recipe = GOLDEN.source(SOURCE).recipe
    checkpoint = write_multimodal_checkpoint(root / "tiny", **recipe)
    return make_bundle(checkpoint, RECORDS[0].setting, root / "bundle")


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[openai.OpenAI]:
    with (bundle.parent / "serve.log").open("wb") as log, served(bundle, log) as client:
        yield client


def check_text(client: openai.OpenAI, bundle: Path, record: golden.Record) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    answer = client.completions.create(
        model=str(bundle),
        prompt=list(record.tokens),
        max_tokens=len(record.greedy),
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    # MAX keeps the marks of a tool's call, which clients look for, and no others.
    dropped = set(tokenizer.all_special_ids) - set(
        tokenizer.convert_tokens_to_ids(["<|tool_call>", "<tool_call|>"])
    )
    expected = tokenizer.decode([t for t in record.greedy if t not in dropped])
    # Of bytes that end amid a character, MAX's streaming decoder holds some back.
    assert answer.choices[0].text.rstrip(CUT) == expected.rstrip(CUT), record.name


def test_text_is_served_as_recorded(client: openai.OpenAI, bundle: Path) -> None:
    for record in RECORDS:
        check_text(client, bundle, record)


def test_log_probabilities_are_those_recorded(
    client: openai.OpenAI, bundle: Path
) -> None:
    for record in RECORDS:
        answer = client.completions.create(
            model=str(bundle),
            prompt=list(record.tokens),
            max_tokens=1,
            temperature=0,
            logprobs=1,
        )
        found = answer.choices[0].logprobs
        assert found is not None
        logits = record.logits[-1].astype(np.float64)
        expected = float(logits[record.greedy[0]] - np.logaddexp.reduce(logits))
        assert found.token_logprobs == pytest.approx([expected], abs=5e-5), record.name


def test_an_image_is_refused_on_a_cpu_and_text_goes_on(
    client: openai.OpenAI, bundle: Path
) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(6)).decode()
    with pytest.raises(openai.BadRequestError, match="runs on a GPU only"):
        client.chat.completions.create(
            model=str(bundle),
            max_tokens=4,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": url}},
                    ],
                }
            ],
        )
    check_text(client, bundle, RECORDS[0])


def test_max_generate_continues_a_prompt(bundle: Path) -> None:
    done = subprocess.run(
        [
            *(str(BIN / "max"), "generate", *flags(bundle), "--top-k", "1"),
            *("--prompt", "The capital of France is", "--max-new-tokens", "8"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
