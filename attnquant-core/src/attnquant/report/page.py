"""The report as one HTML page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import attnquant
from attnquant.report.anatomy import Anatomy
from attnquant.report.evaluations import EvaluationFigures
from attnquant.theta.checkpoint import Checkpoint

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #222; background: #fafaf8;
       margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 70rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .4rem; padding-top: 1rem;
     border-top: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
p { max-width: 46rem; margin: .3rem 0 .8rem; }
.quiet { color: #666; font-size: .9rem; }
figure { margin: .6rem 0 1.4rem; background: #fff; border: 1px solid #e5e5e0;
         border-radius: 6px; padding: .8rem; overflow-x: auto; }
img { display: block; width: 100%; min-width: 46rem; max-width: max-content;
      height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; background: #fff; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #e5e5e0;
         white-space: nowrap; }
th { font-weight: 600; color: #555; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
th:nth-child(n+7) { min-width: 9rem; }
"""


_SIZES = "Sizes are of all tensors, in decimal megabytes."


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        file: The name of its file.
        alt: What it is, for those who do not see it.
        text: How to read it.
        png: The file's bytes.
    """

    file: str
    alt: str
    text: str
    png: bytes


@dataclass(frozen=True)
class Section:
    """What the page says of one bundle: its anatomy, and pictures with headlines."""

    anatomy: Anatomy
    pictures: Sequence[tuple[str, Picture]]


def render(
    sections: Sequence[Section],
    evaluations: Sequence[EvaluationFigures],
    overview: Picture | None,
    reference: Checkpoint,
) -> str:
    """Return the page.

    Args:
        sections: One per bundle.
        evaluations: What `attnquant eval` measured.
        overview: Size against perplexity, if anything was measured.
        reference: The original.
    """
    count = len(sections)
    bundles = "theta bundle" if count == 1 else "theta bundles"
    title = f"{count} {bundles} of {reference.path.resolve().name}"
    made_by = f"Made by attnquant report {attnquant.__version__}. {_SIZES}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(made_by)}</p>',
        _table(sections, evaluations, _bytes(reference)),
    ]
    if overview is not None:
        parts.append("<h2>Size against perplexity</h2>")
        parts += [f"<p>{escape(overview.text)}</p>", _figure(overview)]
    for section in sections:
        parts.append(f"<h2>{escape(_name(section))}</h2>")
        parts.append(f'<p class="quiet">{escape(_settings(section))}</p>')
        for headline, picture in section.pictures:
            parts.append(f"<h3>{escape(headline)}</h3><p>{escape(picture.text)}</p>")
            parts.append(_figure(picture))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _table(
    sections: Sequence[Section],
    evaluations: Sequence[EvaluationFigures],
    reference_bytes: int,
) -> str:
    names = list(dict.fromkeys(t.name for e in evaluations for t in e.texts))
    header = ["bundle", "method", "G", "r", "MB", "of original"]
    header += [f"perplexity ratio, {name}" for name in names]
    rows = []
    for section in sections:
        bundle = section.anatomy.bundle
        layout = bundle.info.layout
        size = _bytes(bundle.checkpoint)
        found = _evaluation(bundle.checkpoint.path, evaluations)
        ratios = {t.name: f"{t.ratio:.3f}" for t in found.texts} if found else {}
        rows.append(
            [
                _name(section),
                bundle.info.method,
                _up_to(layout.shared_blocks, exactly=layout.has_equal_bands),
                _up_to(layout.lora_rank, exactly=layout.has_equal_ranks),
                f"{size / 1e6:,.1f}",
                f"{size / reference_bytes:.1%}",
                *(ratios.get(name, "-") for name in names),
            ]
        )
    cells = [("th", header), *(("td", row) for row in rows)]
    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in row) + "</tr>"
        for tag, row in cells
    ]
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def _evaluation(
    path: Path, evaluations: Sequence[EvaluationFigures]
) -> EvaluationFigures | None:
    target = path.resolve()
    return next((e for e in evaluations if e.bundle.resolve() == target), None)


def _bytes(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint.tensors.infos.values())


def _name(section: Section) -> str:
    return section.anatomy.bundle.checkpoint.path.resolve().name


def _up_to(number: int, *, exactly: bool) -> str:
    return str(number) if exactly else f"up to {number}"


def _settings(section: Section) -> str:
    info = section.anatomy.bundle.info
    layout = info.layout
    families = ", ".join(
        f"{family} {layout.blocks[family]} and {rank}"
        for family, rank in layout.ranks.items()
        if family in info.error
    )
    return (
        f"{layout.num_layers} layers, method {info.method}, {info.dtype}. Bands and"
        f" largest rank of each family: {families}. Made from {info.source.name}."
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    alt = escape(picture.alt, quote=True)
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"></figure>'
