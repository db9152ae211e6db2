"""Storage dtypes, bfloat16 among them, as numpy arrays.

bfloat16 is `ml_dtypes.bfloat16`, numpy's usual extension type: importing it is also
what lets `safetensors.numpy` read and write bfloat16 bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from attnquant.errors import SettingError

Array = npt.NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)

STORAGE_DTYPES: dict[str, np.dtype[Any]] = {"float32": FLOAT32, "bfloat16": BFLOAT16}
"""What W0, U, s and V can be stored in."""

_SAFETENSORS_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": FLOAT32,
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def storage_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a storage dtype's name.

    Raises:
        SettingError: If bases and factors cannot be stored in it.
    """
    if name not in STORAGE_DTYPES:
        raise SettingError(
            "dtype", expected="one of " + ", ".join(STORAGE_DTYPES), found=repr(name)
        )
    return STORAGE_DTYPES[name]


def from_safetensors(code: str) -> np.dtype[Any] | None:
    """Return the numpy dtype of a safetensors dtype code; None if there is none."""
    return _SAFETENSORS_DTYPES.get(code)


def safetensors_code(dtype: np.dtype[Any]) -> str:
    """Return the safetensors dtype code of a numpy dtype.

    Raises:
        KeyError: If there is none.
    """
    return {known: code for code, known in _SAFETENSORS_DTYPES.items()}[dtype]


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype holds real numbers (bfloat16 included)."""
    return dtype == BFLOAT16 or np.issubdtype(dtype, np.floating)


def widen(array: Array) -> npt.NDArray[np.float32]:
    """Return the array in float32; exact from bfloat16, float16 and float32."""
    return np.asarray(array, dtype=np.float32)


def common_storage_dtype(names: Iterable[str]) -> str:
    """Return the dtype that theta tensors are stored in by default.

    Args:
        names: The dtypes of a checkpoint's projections.

    Returns:
        Their dtype if they have one that W0, U, s and V can be stored in, else
        float32.
    """
    found = set(names)
    if len(found) == 1 and found <= set(STORAGE_DTYPES):
        return found.pop()
    return "float32"
