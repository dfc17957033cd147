"""Worker build: what a worker's tokens depend on besides the request, as receipts show it."""

import hashlib
import logging
import platform
import threading
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from common import native_kernels
from common.model_files import weight_files
from common.process import machine
from common.settings.settings import Settings
from common.weight_digest import digest_weights, yield_to_others
from gpu_worker.protocol import Ready

log = logging.getLogger(__name__)

SETTINGS = (
    *("revision", "quantize", "kv_cache_dtype", "rope_scaling", "rope_factor", "deterministic"),
    *(
        "speculate",
        "speculative_config",
        "num_shard",
        "pipeline_parallel_size",
        "enforce_eager",
        "load_format",
    ),
)
"""Settings on which the bits of a logit may depend; their defaults are shown, too."""
LIBRARIES = ("tokenfleet", "torch", "transformers", "tokenizers", "llguidance", "triton", "flashinfer-python")


class WeightDigest:
    """SHA-256 of a model's weights, which a thread of the lowest priority computes while the engine loads: no
    start and no step waits for it.

    Attributes:
        sha256: empty until it is known, and for random weights.
    """

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.sha256 = ""
        self.files = [] if settings.makes_weights else weight_files(directory)
        threading.Thread(target=self.compute, name="digest", daemon=True).start()

    def compute(self) -> None:
        """Set the digest; it stays empty if the weights cannot be read."""
        try:
            yield_to_others()
            self.sha256 = digest_weights(self.files)
        except OSError as error:
            log.warning("receipts lack the digest of the weights: %s", error)


class WorkerBuild:
    """What a worker is made of, for its heartbeats."""

    def __init__(self, settings: Settings, ready: Ready, directory: Path, digest: WeightDigest) -> None:
        self.fields = describe(settings, ready, directory)
        self.digest = digest

    @property
    def text(self) -> bytes:
        """JSON, without line breaks."""
        return orjson.dumps(self.fields | {"weights_sha256": self.digest.sha256 or None})


def describe(settings: Settings, ready: Ready, directory: Path) -> dict[str, Any]:
    """All but the digest of the weights."""
    config = directory / "config.json"
    return {
        "model_id": settings.model_id,
        "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
        "dtype": ready.dtype,
        "device": ready.device,
        "inexact_because": ready.inexact_because or None,
        "processor": processor(ready.device),
        "kernels": kernels(),
        "block_size": ready.block_size,
        "settings": {name: getattr(settings, name) for name in SETTINGS},
        "versions": library_versions(),
    }


def processor(device: str) -> str:
    """The name of the processor, and a digest of its instructions, which choose the kernels; on CUDA the
    names of the GPUs, and the driver.
    """
    if device != "cpu":
        return ", ".join(sorted({f"{gpu.name}, driver {gpu.driver}" for gpu in machine.list_gpus()}))
    name = machine.read_field("model name") or platform.processor() or platform.machine()
    return f"{name} ({native_kernels.digest([machine.features()])})"


@cache
def kernels() -> str:
    """A digest of the sources of the kernels on CPU."""
    return native_kernels.digest(native_kernels.source_texts())


@cache
def library_versions() -> Mapping[str, str | None]:
    """The version of each library that computes; null where it is not installed."""
    return {name: installed_version(name) for name in LIBRARIES}


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
