"""Compilation of the C++ kernels of `kernels/`, once for this processor: its sources side by side, to objects
in the user's cache. native.py links them with the OpenMP runtime that torch brings.

`python -m gpu_worker.engine.cpu.compile` does it before a worker asks, while pip installs (deploy/install.sh)
or the launcher converts the model. Nothing here needs an installed package.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.process import machine
from common.process.machine import features, find_compiler, make_cache_folder

SOURCES = Path(__file__).with_name("kernels")
COMPILED = "native"
"""The cache folder of compiled kernels."""


def digest(command: list[str]) -> str:
    """Return a digest of a command, of the sources, of the compiler's version, and of this processor's
    features, which `-march=native` means. Raises OSError or SubprocessError.
    """
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    texts = [path.read_text() for path in sorted(SOURCES.iterdir()) if path.is_file()]
    return hashlib.sha256(repr([*texts, version, features(), command]).encode()).hexdigest()[:24]


def compile_command(openmp: bool = True) -> list[str]:
    """A plain `-fopenmp` would link the compiler's own runtime, too, and Apple's compiler refuses it. Raises
    FileNotFoundError.
    """
    if not (found := find_compiler()):
        raise FileNotFoundError("no C++ compiler (g++ or clang++) is installed")
    return [
        *(found, "-std=c++17", "-O3", "-fPIC"),
        *([] if sys.platform == "darwin" else ["-march=native"]),  # Apple's compilers mean an M1 without it
        *(["-Xpreprocessor", "-fopenmp"] if openmp else []),
        *(["-DSPLIT_PAIRS"] if machine.prefers_widened_bfloat16() else []),
        *([] if machine.permits_tiles() else ["-DNO_AMX"]),
    ]


def compile_objects(command: list[str]) -> list[str]:
    """Compile what no other process has compiled, as many sources at once as there are cores; others wait
    meanwhile. Raises OSError or SubprocessError.
    """
    folder, name = make_cache_folder(COMPILED), digest(command)
    objects = {source: folder / f"{name}-{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
    with (folder / "lock").open("w") as lock, ThreadPoolExecutor(machine.num_cores()) as compilers:
        fcntl.flock(lock, fcntl.LOCK_EX)
        list(compilers.map(write, ([*command, "-c", str(source)] for source in objects), objects.values()))
    return [str(path) for path in objects.values()]


def write(command: list[str], path: Path) -> None:
    """Have a compiler write a file, unless it is there: whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}")
    if not path.exists():
        subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=True)
        part.rename(path)


if __name__ == "__main__":
    compile_objects(compile_command())
