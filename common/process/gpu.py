"""NVIDIA GPUs of this machine, as their driver's library (NVML) lists them."""

from typing import NamedTuple

import pynvml


class Gpu(NamedTuple):
    uuid: str
    name: str
    memory_bytes: int
    driver: str


def list_gpus() -> list[Gpu]:
    """The GPUs in the order of the PCI bus; none where there is no driver, or where it fails."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetName(handle),
                pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                driver,
            )
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
