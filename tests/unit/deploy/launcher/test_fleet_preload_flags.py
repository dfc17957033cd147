"""What may be preloaded follows from memory, unless a setting demands it."""

from typing import Any

import pytest

from common.process import machine
from common.process.launch import LOAD_FLAG, PRELOAD_FLAG
from common.settings.settings import Settings
from deploy.launcher.fleet import GATEWAY_BYTES, RANK_BYTES, gateway_flags, worker_flags

WORKER_BYTES = 2 * RANK_BYTES
CACHE_BYTES = 3 * 2**20
SETTINGS: dict[str, Any] = {"device": "cpu", "num_workers": 2, "kv_cache_bytes": CACHE_BYTES}


@pytest.mark.parametrize(
    ("spare_bytes", "settings", "flags"),
    [
        (2 * WORKER_BYTES, {}, [PRELOAD_FLAG, LOAD_FLAG]),
        (2 * WORKER_BYTES - 1, {}, [PRELOAD_FLAG]),
        (2 * RANK_BYTES, {}, [PRELOAD_FLAG]),
        (2 * RANK_BYTES - 1, {}, []),
        (2 * RANK_BYTES - 1, {"preload_worker": True}, [PRELOAD_FLAG]),
        (2 * RANK_BYTES, {"num_shard": 2}, []),
        (2 * WORKER_BYTES, {"num_shard": 2}, [PRELOAD_FLAG]),
        (4 * WORKER_BYTES, {"device": "cuda"}, [PRELOAD_FLAG]),
    ],
)
def test_a_worker_is_preloaded_with_its_model_or_without(
    spare_bytes: int, settings: dict[str, Any], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caches of all workers may still take is not free. Ranks and GPUs load for themselves."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * CACHE_BYTES + spare_bytes)
    assert worker_flags(Settings(**SETTINGS | settings), WORKER_BYTES) == flags


def test_a_model_of_unknown_size_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc nobody knows what a worker takes: a second model might fill the memory."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 2**40)
    assert worker_flags(Settings(**SETTINGS), 0) == [PRELOAD_FLAG]


@pytest.mark.parametrize(
    ("spare_bytes", "wanted", "flags"),
    [
        (2 * GATEWAY_BYTES, None, [PRELOAD_FLAG]),
        (2 * GATEWAY_BYTES - 1, None, []),
        (2 * GATEWAY_BYTES - 1, True, [PRELOAD_FLAG]),
    ],
)
def test_a_gateway_is_preloaded(
    spare_bytes: int, wanted: bool | None, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * CACHE_BYTES + spare_bytes)
    assert gateway_flags(Settings(**SETTINGS, preload_gateway=wanted)) == flags
