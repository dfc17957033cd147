"""The C++ kernels of `kernels/`, called through ctypes.

They run on the threads of torch's own OpenMP runtime: two runtimes would fight for the cores.
"""

import ctypes
import functools
import logging
import re
import subprocess
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from common.process.machine import make_cache_folder
from gpu_worker.engine.cpu.compile import COMPILED, SOURCES, compile_command, compile_objects, digest, write

log = logging.getLogger(__name__)

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STORED_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""Of numbers that only a KV cache holds."""
ANY_ROWS = 2**31 - 1
"""`tf_block_rows` of a type whose weights in blocks are faster than plain ones for any number of rows."""


NUMBERS = {"int": c_int32, "int32_t": c_int32, "int64_t": c_int64, "float": c_float}
"""By their names in C++. A pointer is an address."""


def read_structs() -> dict[str, type[ctypes.Structure]]:
    """The structs in which Python passes arguments, as kernels/structs.h has them."""
    text = re.sub(r"//.*", "", (SOURCES / "structs.h").read_text())
    types: dict[str, Any] = {}
    for name, body in re.findall(r"struct (\w+) {(.*?)}", text, re.DOTALL):
        fields = [
            (field.strip(" *\n"), c_void_p if "*" in field else (NUMBERS | types)[kind])
            for kind, names in re.findall(r"(?:const )?(\w+)([^;]+);", body)
            for field in names.split(",")
        ]
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types


structs = read_structs()


def read_signatures() -> dict[str, list[Any]]:
    """The types of the arguments of functions in kernels/*.cpp."""
    text = "".join(path.read_text() for path in sorted(SOURCES.glob("*.cpp")))
    return {
        name: [c_void_p if "*" in one else NUMBERS[one.split()[0]] for one in arguments.split(",")]
        for name, arguments in re.findall(r'extern "C" \w+ (\w+)\(([^)]*)\)', text)
    }


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None if there is no compiler, or it fails: then torch computes."""
    try:
        loaded = ctypes.CDLL(str(build_library()))
    except (OSError, subprocess.SubprocessError) as error:
        [first, *_] = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.warning("no native kernels, torch's are used and are slower: %s", first)
        return None
    for name, arguments in read_signatures().items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, c_int32
    return loaded


def build_library() -> Path:
    """Raises OSError or SubprocessError."""
    command = compile_command(bool(openmp_runtime()))
    path = make_cache_folder(COMPILED) / f"{digest([*command, *openmp_runtime()])}.so"
    if not path.exists():
        log.info("compiling native kernels, once for this machine: up to 15 s")
        write([command[0], "-shared", *compile_objects(command), *openmp_runtime()], path)
    return path


@functools.cache
def openmp_runtime() -> list[str]:
    """The OpenMP runtime that torch has loaded, and not one of another package; none where it has none: then
    kernels have one thread.
    """
    maps, own = Path("/proc/self/maps"), Path(torch.__file__).parent
    loaded = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    found = [Path(name) for name in loaded] + [*(own / "lib").glob("lib*omp*.dylib")]
    runtimes = [str(one) for one in found if one.name.startswith(("libgomp", "libomp", "libiomp5"))]
    return sorted(runtimes, key=lambda name: (not name.startswith(str(own)), name))[:1]
