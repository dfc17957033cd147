"""Fixtures of the engine's tests."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.process import machine
from gpu_worker.engine.attention.backend import Geometry
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cuda.linear import fuse_linears
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import load, passes, warmup
from tests.support.engine.fake_flashinfer import install
from tests.support.engine.on_cuda import HOPPER, again
from tests.support.engine.tiny_engine import engine_of


@pytest.fixture(scope="session", autouse=True)
def share_of_the_cores() -> Iterator[None]:
    """Engines, and kernels without one, leave cores to the other processes of pytest-xdist: threads that wait
    for each other are slow where processes share a core.
    """
    num_threads = max(1, machine.num_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    torch.set_num_threads(num_threads)
    native.library()  # compiled once, before a test sets another cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "threads_of", lambda settings, communicator: num_threads)
        yield


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    if (found := native.library()) is None:
        assert not machine.find_compiler(), "the kernels do not compile"
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine on CPU made as one on CUDA is, but for the compiler."""
    if not install():
        pytest.skip("where there is a GPU, the tests marked gpu try the real parts")
    from gpu_worker.engine.attention.flashinfer import FlashInferBackend

    def made(folder: Path, generation: int = HOPPER) -> Engine:
        def backend_of(geometry: Geometry, device: torch.device, *limits: int) -> FlashInferBackend:
            return FlashInferBackend(geometry, device, generation, *limits)

        monkeypatch.setattr(passes, "pack_linears", lambda model, *_: fuse_linears(model))
        monkeypatch.setattr(load, "choose_backend", backend_of)
        monkeypatch.setattr(warmup, "FIXED_TOKENS", 12)
        engine = engine_of(folder, block_size=16)
        engine.runs_ahead = True
        if engine.loaded.capturable:
            engine.capture(again, 3, False)
        return engine

    return made
