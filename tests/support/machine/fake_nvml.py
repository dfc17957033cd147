"""A driver's library (NVML) with the GPUs that a test wants."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

MEMORY_BYTES = 143_771 * 2**20


def install(monkeypatch: pytest.MonkeyPatch, *uuids: str, fails: bool = False) -> None:
    """Make pynvml answer with these GPUs. `fails`: the library is there, but no driver answers."""

    def init() -> None:
        if fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    answers: dict[str, Any] = {
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: len(uuids),
        "nvmlDeviceGetHandleByIndex": lambda index: uuids[index],
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetName": lambda _: "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=MEMORY_BYTES),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
