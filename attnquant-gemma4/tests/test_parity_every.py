"""Every tiny model, in every formulation, at passthrough and at G < L, as recorded.

`test_parity_tiny` and the conformance kit have what else runs every day; here is the
rest of the table. `dense` has one graph for a model, at any G: it is compiled once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from attnquant.testing.parity import check_batch, check_record, make_bundle, serving
from gemma4_support import golden
from gemma4_support.tiny import write_tiny_checkpoint

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
SHARED: Final = {
    "pattern": "g4-r4-all",
    "irregular": "g3-r8-attn",
    "experts": "g2-r4-all",
}


def case(source: str, setting: str, formulation: str, *, everyday: bool) -> Any:
    marks = () if everyday else (pytest.mark.exhaustive,)
    name = f"{source}-{setting}-{formulation}"
    return pytest.param(source, setting, formulation, marks=marks, id=name)


TABLE: Final = [
    # Kinds in no order, full layers with values of their own, untied, no soft cap: what
    # `test_parity_tiny` has at passthrough alone.
    case("irregular", SHARED["irregular"], "gemm", everyday=True),
    case("irregular", SHARED["irregular"], "dense", everyday=True),
    case("irregular", "passthrough", "dense", everyday=False),
    case("pattern", "passthrough", "gemm", everyday=False),
    case("pattern", "passthrough", "dense", everyday=False),
    case("pattern", SHARED["pattern"], "gemm", everyday=False),
    case("pattern", SHARED["pattern"], "dense", everyday=False),
    case("experts", "passthrough", "gemm", everyday=False),
    case("experts", SHARED["experts"], "gemm", everyday=False),
]


@pytest.mark.parametrize(("source", "setting", "formulation"), TABLE)
def test_every_prompt_equals_transformers_alone_and_in_a_batch(
    tmp_path: Path, source: str, setting: str, formulation: str
) -> None:
    recipe = GOLDEN.source(source).recipe
    checkpoint = write_tiny_checkpoint(tmp_path / source, **recipe)
    records = GOLDEN.of(source, setting)
    bundle = make_bundle(checkpoint, records[0].setting, tmp_path / "bundle")
    with serving(bundle, formulation) as model:
        alone = [check_record(model, record, golden.compare) for record in records]
        check_batch(model, records, alone)
