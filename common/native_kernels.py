"""Native kernels: the C++ sources of the engine's kernels on CPU, the compiler, and the cache folder of what
was compiled. `doctor` looks here, too: no torch.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

from common.model_files import cache_folder
from common.process import machine

SOURCES = Path(__file__).parents[1] / "gpu_worker/engine/cpu/kernels"
COMPILED = "native"
"""The cache folder of compiled kernels."""
COMPILERS = ("c++", "g++", "clang++")


def find_compiler() -> str | None:
    return next((name for name in COMPILERS if shutil.which(name)), None)


def source_key(compiler: str) -> str:
    """Return what the names of compiled kernels begin with: a digest of the sources, of the compiler's
    version, and of this processor's features, which `-march=native` means. Raises OSError or SubprocessError.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return digest([*source_texts(), version, machine.features()])


def source_texts() -> list[str]:
    return [path.read_text() for path in sorted(SOURCES.iterdir()) if path.is_file()]


def digest(parts: list[str]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def are_compiled(compiler: str) -> bool:
    """Whether a start with this compiler finds its kernels compiled. Raises OSError or SubprocessError."""
    return any(cache_folder(COMPILED).glob(f"{source_key(compiler)}-*.so"))
