"""What the device must be for a decoder of this package to run on it."""

from __future__ import annotations

from typing import Protocol

from max.dtype import DType
from max.graph import DeviceRef
from max.pipelines.modeling.config_enums import SupportedEncoding

from attnquant.errors import ServingError

MIN_CPU_WINDOW = 128
"""MAX's CPU attention does not compile for sliding windows narrower than this."""


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
