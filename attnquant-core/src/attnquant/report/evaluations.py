"""What `attnquant eval --json` printed, read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnquant.errors import CheckpointError
from attnquant.theta.checkpoint import read_json


@dataclass(frozen=True)
class TextFigures:
    """One text's figures: see `attnquant.evaluation.measures.Comparison`."""

    name: str
    tokens: int
    reference_perplexity: float
    perplexity: float
    mean_kl: float
    top1_agreement: float

    @property
    def ratio(self) -> float:
        """The perplexity as a multiple of the original's."""
        return self.perplexity / self.reference_perplexity


@dataclass(frozen=True)
class EvaluationFigures:
    """One evaluation; sizes in bytes."""

    bundle: Path
    bundle_bytes: int
    reference_bytes: int
    texts: tuple[TextFigures, ...]

    @property
    def name(self) -> str:
        """The bundle's name."""
        return self.bundle.name


def read_evaluation(path: Path) -> EvaluationFigures:
    """Read a file that `attnquant eval --json` printed.

    Raises:
        CheckpointError: If it is something else.
    """
    data = read_json(path)
    try:
        return EvaluationFigures(
            bundle=Path(data["bundle"]),
            bundle_bytes=int(data["bundle_bytes"]),
            reference_bytes=int(data["reference_bytes"]),
            texts=tuple(
                TextFigures(
                    name=str(text["name"]),
                    tokens=int(text["tokens"]),
                    reference_perplexity=float(text["reference_perplexity"]),
                    perplexity=float(text["perplexity"]),
                    mean_kl=float(text["mean_kl"]),
                    top1_agreement=float(text["top1_agreement"]),
                )
                for text in data["texts"]
            ),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            str(path),
            expected="what `attnquant eval --json` prints",
            found=f"{type(error).__name__}: {error}",
        ) from error
