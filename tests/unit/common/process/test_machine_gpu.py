import pytest

from common.process.machine import Gpu, list_gpus
from tests.support.machine import fake_nvml


def test_gpus_are_listed_as_the_driver_orders_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, "GPU-b", "GPU-a")
    assert [gpu.uuid for gpu in list_gpus()] == ["GPU-b", "GPU-a"]
    assert list_gpus()[0] == Gpu("GPU-b", "NVIDIA H200", fake_nvml.MEMORY_BYTES, "570.1")


def test_a_driver_that_fails_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, "GPU-a", fails=True)
    assert list_gpus() == []
