"""Machine: whether this process may use the matrix unit's registers."""

import pytest

from common.process import machine


def test_a_processor_without_tiles_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's number means something else on other processors."""
    monkeypatch.setattr(machine, "features", lambda: "avx512f avx512_bf16")
    monkeypatch.setattr(machine.ctypes, "CDLL", None)
    assert machine.permits_tiles.__wrapped__() is False


@pytest.mark.parametrize(("answer", "permits"), [(0, True), (-1, False)])
def test_linux_decides(answer: int, permits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def syscall(self, *arguments: int) -> int:
            calls.append(arguments)
            return answer

    monkeypatch.setattr(machine, "features", lambda: "amx_bf16 amx_tile")
    monkeypatch.setattr(machine.ctypes, "CDLL", Library)
    assert machine.permits_tiles.__wrapped__() is permits
    assert calls == [(158, 0x1023, 18)]
