"""What the commands that run a model have in common: options, loading, a bar."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from attnquant.errors import ServingError
from attnquant.evaluation.runs import Progress
from attnquant.evaluation.windows import WINDOW, Tokens, Windows, cut
from attnquant.texts import Text, read_text

if TYPE_CHECKING:
    from attnquant.serving.probe import Probe

OPTIONS = {"window": "--window", "tokens": "--tokens"}
"""How the user knows a setting."""

ENCODINGS = ("float32", "bfloat16")


def add_running_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say what to run, and where."""
    parser.add_argument(
        "--window",
        type=int,
        default=WINDOW,
        metavar="N",
        help=f"cut texts into runs of N tokens, each by itself (default: {WINDOW})",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="use at most N tokens of each text (default: all)",
    )
    parser.add_argument(
        "--devices",
        default="cpu",
        metavar="DEVICE",
        help="where to run, as MAX names it: cpu, gpu, gpu:1 (default: cpu)",
    )
    parser.add_argument(
        "--quantization-encoding",
        choices=ENCODINGS,
        default=ENCODINGS[0],
        help=f"dtype to compute in, as MAX names it (default: {ENCODINGS[0]})",
    )


def texts_of(
    options: argparse.Namespace, default: Callable[[], Sequence[Text]]
) -> Sequence[Text]:
    """Return the texts that were named, or else the default ones."""
    return [read_text(path) for path in options.text] if options.text else default()


def windows_of(
    options: argparse.Namespace, checkpoint: Path, texts: Sequence[Text]
) -> Windows:
    """Encode texts as a checkpoint's tokenizer does, and cut them.

    Raises:
        SettingError: If a number is out of range.
        ServingError: If MAX is not installed, or there is no tokenizer.
    """
    with _max_at_hand():
        from attnquant.serving.tokens import Encoder

        encoder = Encoder(checkpoint)
    tokens = [
        Tokens(text, encoder.start, tuple(encoder.encode(text.content)))
        for text in texts
    ]
    return cut(tokens, options.window, options.tokens)


def load(options: argparse.Namespace, path: Path) -> Probe:
    """Load a model on MAX.

    Raises:
        ServingError: If MAX is not installed.
        AttnQuantError: If the model cannot be run.
    """
    with _max_at_hand():
        from attnquant.serving.probe import Probe

    return Probe(
        path,
        window=options.window,
        devices=options.devices,
        encoding=options.quantization_encoding,
    )


@contextmanager
def progress_bar(what: str, windows: Windows) -> Iterator[Progress]:
    """Show how many tokens are done, on a terminal only."""
    with tqdm(
        total=windows.total, desc=what, unit="token", disable=None, file=sys.stderr
    ) as bar:

        def show(tokens: int) -> None:
            bar.update(tokens)

        yield show


@contextmanager
def _max_at_hand() -> Iterator[None]:
    # transformers, which MAX imports, would advise to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        yield
    except ModuleNotFoundError as error:
        raise ServingError(
            "this command",
            expected="MAX, which it runs the model with",
            found=str(error),
            hint='Install it: pip install "attnquant-core[serving]".',
        ) from error
