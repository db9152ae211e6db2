"""`attnquant report`: one page that needs nothing else, and its pictures."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from core_support import processes
from core_support.processes import Run
from core_support.tiny import read_weights, write_json


@pytest.fixture
def bundle(run: Run, model: Path, tmp_path: Path) -> Path:
    out = tmp_path / "a<b>"
    done = run("decompose", model, "--out", out, "--blocks", 2, "--rank", 3)
    assert done.code == 0, done.err
    return out


@pytest.fixture
def evaluation(bundle: Path, tmp_path: Path) -> Path:
    text = {
        "name": "held & out",
        "tokens": 90,
        "reference_perplexity": 10.0,
        "perplexity": 12.5,
        "mean_kl": 0.2,
        "top1_agreement": 0.8,
    }
    data = {"bundle": str(bundle), "bundle_bytes": 900, "reference_bytes": 1000}
    write_json(tmp_path / "eval.json", {**data, "texts": [text]})
    return tmp_path / "eval.json"


class Page(HTMLParser):
    """What a page shows, and what it would load from elsewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.images: list[dict[str, str | None]] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_its_pictures(
    run: Run, model: Path, bundle: Path, evaluation: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run(
        *("report", bundle, "--reference", model, "--out", out),
        *("--eval", evaluation),
    )
    assert (done.code, done.err) == (0, "")
    html = (out / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    pictures = {path.read_bytes() for path in out.glob("*.png")}
    assert len(pictures) == 4
    shown = {
        base64.b64decode(str(image["src"]).removeprefix("data:image/png;base64,"))
        for image in page.images
    }
    assert shown == pictures
    assert all(image["alt"] for image in page.images)
    assert not page.tags & {"script", "link", "iframe"}
    assert not re.search(r"(?:src|href)=\"(?!data:)", html)
    sizes = [
        sum(array.nbytes for array in read_weights(path).values())
        for path in (bundle, model)
    ]
    share = f"{sizes[0] / sizes[1]:.1%}"
    for expected in ("a<b>", "held & out", "1.250", share, "mean-svd"):
        assert expected in page.text


def test_the_json_names_the_files(
    run: Run, model: Path, bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run("report", bundle, "--reference", model, "--out", out, "--json")
    shown: dict[str, Any] = json.loads(done.out)
    assert shown["report"] == str(out / "report.html")
    assert shown["files"] == sorted(path.name for path in out.iterdir())


def test_only_a_report_is_replaced(
    run: Run, model: Path, bundle: Path, tmp_path: Path
) -> None:
    command = ("report", bundle, "--reference", model, "--out")
    assert run(*command, tmp_path / "out").code == 0
    assert "does not exist yet" in run(*command, tmp_path / "out").error()
    assert run(*command, tmp_path / "out", "--overwrite").code == 0
    error = run(*command, bundle, "--overwrite").error()
    assert "expected an earlier report" in error
    assert (bundle / "config.json").exists()


def test_without_matplotlib_it_says_what_to_install(
    run: Run, model: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "matplotlib" else find(name, *more),
    )
    done = run("report", bundle, "--reference", model, "--out", tmp_path / "out")
    assert done.error().endswith('Install it: pip install "attnquant-core[report]".')
    assert not (tmp_path / "out").exists()


def test_the_command_itself_needs_no_matplotlib() -> None:
    code = (
        "import sys; from attnquant.cli.main import build_parser; build_parser();"
        " sys.exit('matplotlib' in sys.modules)"
    )
    assert processes.python(code).returncode == 0


def test_two_bundles_of_one_name_are_refused(
    run: Run, model: Path, bundle: Path, tmp_path: Path
) -> None:
    done = run("report", bundle, bundle, "--reference", model, "--out", tmp_path / "o")
    assert (
        done.error()
        == "BUNDLE: expected directories of different names, found two a<b>"
    )


def test_what_is_no_evaluation_is_refused(
    run: Run, model: Path, bundle: Path, tmp_path: Path
) -> None:
    write_json(tmp_path / "other.json", {"bundle": "b"})
    command = ("report", bundle, "--reference", model, "--out", tmp_path / "out")
    error = run(*command, "--eval", tmp_path / "other.json").error()
    assert "expected what `attnquant eval --json` prints, found KeyError" in error
    assert not (tmp_path / "out").exists()


def test_a_bundle_is_no_reference(run: Run, bundle: Path, tmp_path: Path) -> None:
    done = run("report", bundle, "--reference", bundle, "--out", tmp_path / "out")
    assert "expected a standard checkpoint, found a theta bundle" in done.error()
