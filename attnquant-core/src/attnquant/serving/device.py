"""What the device must be for a decoder of this package to run on it."""

from __future__ import annotations

from typing import Protocol

from max.dtype import DType
from max.graph import DeviceRef
from max.pipelines.modeling.config_enums import SupportedEncoding

from attnquant.errors import ServingError

MIN_CPU_WINDOW = 128
"""MAX's CPU attention does not compile for sliding windows narrower than this."""

CPU_ROW = 32
"""How many float32 each row must be a multiple of where norms surround a residual.

MAX 26.7's CPU kernel of a norm, an addition and a norm reads rows in whole aligned
vectors of 16, as AVX-512 has them. In a model it crashes at 80 as well, since not every
buffer begins at such a place; 64 and 96 are served.
"""


class DeviceConfig(Protocol):
    """What a model's config says of device and dtype."""

    devices: list[DeviceRef]
    dtype: DType
    quantization_encoding: SupportedEncoding | None

    @property
    def sliding_window(self) -> int | None:
        """How far back a sliding layer sees; None without such layers."""
        ...


def check_device(config: DeviceConfig) -> None:
    """Refuse devices, encodings and windows that MAX cannot compile for.

    Raises:
        ServingError: Naming the flag or the field of `config.json`.
    """
    if len(config.devices) > 1:
        raise ServingError(
            "--devices", expected="one device", found=str(len(config.devices))
        )
    if not config.devices[0].is_cpu():
        return
    if config.dtype != DType.float32:
        raise ServingError(
            "--quantization-encoding",
            expected="float32 on a CPU",
            found=str(config.quantization_encoding),
            hint="Add `--quantization-encoding float32`.",
        )
    window = config.sliding_window
    if window is not None and window < MIN_CPU_WINDOW:
        raise ServingError(
            "config.json: sliding_window",
            expected=f"at least {MIN_CPU_WINDOW} on a CPU",
            found=str(window),
            hint="MAX cannot compile narrower windows for CPUs; a GPU can serve it.",
        )


def check_sandwich_norms(config: DeviceConfig, hidden_size: int) -> None:
    """Refuse widths that MAX's norms before and after each block crash at.

    For decoders that normalise a block's output, add it to the residual stream and
    normalise that again, as Gemma's do: MAX fuses the three.

    Raises:
        ServingError: Naming the field of `config.json`.
    """
    if config.devices[0].is_cpu() and hidden_size % CPU_ROW:
        raise ServingError(
            "config.json: hidden_size",
            expected=f"a multiple of {CPU_ROW} on a CPU",
            found=str(hidden_size),
            hint="MAX crashes at other widths on CPUs; a GPU can serve it.",
        )
