"""`max serve` on tiny bundles: the OpenAI-compatible endpoint, as clients see it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from attnquant.testing.parity import make_bundle
from attnquant.testing.server import served
from gemma3_support import golden
from gemma3_support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
GOLDEN = golden.load(ROOT / "attnquant-gemma3" / "tests" / "golden" / "tiny.npz")
CUT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    checkpoint = write_tiny_checkpoint(root / "tied", **GOLDEN.source("tied").recipe)
    setting = next(r.setting for r in GOLDEN.records if r.setting.name == "g3-r4-all")
    return make_bundle(checkpoint, setting, root / "bundle")


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[openai.OpenAI]:
    with (bundle.parent / "serve.log").open("wb") as log, served(bundle, log) as client:
        yield client


def test_a_bundle_is_served_greedily_as_recorded(
    client: openai.OpenAI, bundle: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    for record in GOLDEN.records:
        if record.source != "tied" or record.setting.name != "g3-r4-all":
            continue
        answer = client.completions.create(
            model=str(bundle),
            prompt=list(record.tokens),
            max_tokens=len(record.greedy),
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        expected = tokenizer.decode(record.greedy, skip_special_tokens=True)
        # Of bytes that end amid a character, MAX's streaming decoder holds some back.
        assert answer.choices[0].text.rstrip(CUT) == expected.rstrip(CUT), record.name


def test_an_unknown_model_is_refused_and_the_server_goes_on(
    client: openai.OpenAI, bundle: Path
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="no-such-model", prompt="x", max_tokens=1)
    assert 400 <= refused.value.status_code < 500
    answer = client.completions.create(model=str(bundle), prompt="x", max_tokens=1)
    assert answer.choices[0].text is not None
