"""From the host to the device, without waiting for what the device does."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any] | list[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An array on the device. Plain copies to CUDA wait until the stream is empty; those from pinned memory are only queued, and torch
    keeps that memory until they are done."""
    tensor = torch.as_tensor(np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
