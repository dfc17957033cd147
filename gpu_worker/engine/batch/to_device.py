"""Copies from the host to the device that do not wait for the device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def pinned(
    array: npt.NDArray[Any] | list[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy an array [...] of int64, float32 or another dtype to a host tensor [...] of `dtype`,
    pinned for CUDA.

    Copies from pinned memory are only queued, and torch keeps the memory until they are done. Copies of other
    memory may wait until the stream is empty.
    """
    tensor = torch.as_tensor(
        np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array, dtype=dtype
    )
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(
    array: npt.NDArray[Any] | list[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy an array [...] of int64, float32 or another dtype to the device → tensor [...] of `dtype`."""
    return pinned(array, device, dtype).to(device, non_blocking=True)
