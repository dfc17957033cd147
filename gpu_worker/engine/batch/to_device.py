"""From the host to the device, without waiting for what the device does."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def pinned(
    array: npt.NDArray[Any] | list[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An array on the host, from where its copies to the device are only queued: torch keeps that memory
    until they are done. Plain copies to CUDA may wait until the stream is empty.
    """
    tensor = torch.as_tensor(
        np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array, dtype=dtype
    )
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(
    array: npt.NDArray[Any] | list[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An array on the device."""
    return pinned(array, device, dtype).to(device, non_blocking=True)
