"""Puts the imitation of FlashInfer where the engine's code finds it."""

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from tests.support.engine.fake_flashinfer import kernels, latents


def install() -> bool:
    """Where the engine's code finds it, and nobody else. Not where the real one is installed, or a GPU on
    which to use it.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is not None:
        return False
    fake, mla = (ModuleType(f"flashinfer{name}") for name in ("", ".mla"))
    fake.BatchPrefillWithPagedKVCacheWrapper = kernels.BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    fake.BatchDecodeWithPagedKVCacheWrapper = kernels.BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    fake.xqa = kernels.xqa  # type: ignore[attr-defined]
    mla.BatchMLAPagedAttentionWrapper = latents.BatchMLAPagedAttentionWrapper  # type: ignore[attr-defined]
    mla.MLAPlanMetadata = latents.MLAPlanMetadata  # type: ignore[attr-defined]
    found = {"flashinfer": fake, "flashinfer.mla": mla}
    sys.modules |= found
    importlib.import_module("gpu_worker.engine.attention.flashinfer")
    for name in found:
        del sys.modules[name]
    return True
