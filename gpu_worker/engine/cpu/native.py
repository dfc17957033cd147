"""The C++ kernels of `kernels/`, called through ctypes.

They run on the threads of torch's own OpenMP runtime: two runtimes would fight for the cores.
"""

import ctypes
import functools
import logging
import subprocess
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from common.process.machine import make_cache_folder
from gpu_worker.engine.cpu.compile import COMPILED, compile_command, compile_objects, digest, write

log = logging.getLogger(__name__)

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STORED_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""Of numbers that only a KV cache holds."""
ANY_ROWS = 2**31 - 1
"""`tf_block_rows` of a type whose weights in blocks are faster than plain ones for any number of rows."""


class LowRankStruct(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in ("down", "up")), ("rank", c_int32)]


class AdaptersStruct(ctypes.Structure):
    _fields_ = [
        ("matrices", c_void_p),
        *((name, c_int32) for name in ("num_linears", "max_rank", "num_runs")),
        *((name, c_void_p) for name in ("runs", "order", "slots", "used")),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("threads", "num_tokens", "num_tiles", "block_size", "num_parts")),
        *((name, c_void_p) for name in ("slots", "tiles", "tables", "adapters")),
    ]


class PagesStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        ("stored", c_int32),
        *((name, c_float) for name in ("key_scale", "value_scale")),
    ]


class CacheStruct(ctypes.Structure):
    _fields_ = [
        ("pages", PagesStruct),
        *((name, c_int32) for name in ("kv_heads", "group", "key_dim", "value_dim", "window")),
        *((name, c_float) for name in ("scaling", "softcap")),
        ("sinks", c_void_p),
    ]


class HeadsStruct(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("token", c_int64), ("head", c_int64)]


class BlocksStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("quants", "scales", "offsets", "codes")),
        *((name, c_int32) for name in ("bits", "size", "half_scales")),
    ]


class LinearStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("packed", "bias")),
        *((name, c_int32) for name in ("inputs", "outputs")),
        ("blocks", BlocksStruct),
        ("number", c_int32),
    ]


class NormStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("epsilon", c_float)]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("cache", POINTER(CacheStruct)),
        *((name, LinearStruct) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, NormStruct) for name in ("before_attention", "before_mlp", "of_query", "of_key")),
        ("rotary", c_int32),
    ]


class SamplerOutputStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "logprobs", "top_ids", "top_logprobs")),
        ("tops", c_int32),
    ]


SIGNATURES = {
    "tf_attend": [c_int32, POINTER(StepStruct), POINTER(CacheStruct), *[POINTER(HeadsStruct)] * 3, c_void_p],
    "tf_multiplies": [c_int32],
    "tf_block_rows": [c_int32],
    "tf_panel": [c_int32],
    "tf_words": [c_int32],
    "tf_pack": [c_int32, c_void_p, c_int32, c_int32, c_void_p],
    "tf_product": [c_int32, c_int32, c_void_p, c_int32, POINTER(LinearStruct), c_int32, c_void_p],
    "tf_adapt": [
        *(c_int32, c_int32, c_void_p, c_int32, POINTER(LinearStruct), POINTER(AdaptersStruct)),
        *(c_int32, c_void_p),
    ],
    "tf_layers": [c_int32, POINTER(StepStruct), POINTER(LayerStruct), c_int32, c_void_p, c_void_p, c_void_p],
    "tf_sample": [
        *(c_int32, c_int32, c_void_p, c_int32, c_int32, c_int64, c_int32),
        *(POINTER(c_void_p), POINTER(SamplerOutputStruct)),
    ],
    "tf_logprobs": [c_int32, c_int32, c_void_p, c_int32, c_int32, c_int64, POINTER(SamplerOutputStruct)],
}
"""As in kernels/*.cpp."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None if there is no compiler, or it fails: then torch computes."""
    try:
        loaded = ctypes.CDLL(str(build_library()))
    except (OSError, subprocess.SubprocessError) as error:
        [first, *_] = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.warning("no native kernels, torch's are used and are slower: %s", first)
        return None
    for name, arguments in SIGNATURES.items():
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
    """The OpenMP runtime that torch has loaded; none where it has none: then kernels have one thread."""
    maps = Path("/proc/self/maps")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    beside = {str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*.dylib")}
    return sorted(
        name for name in loaded | beside if Path(name).name.startswith(("libgomp", "libomp", "libiomp5"))
    )[:1]
