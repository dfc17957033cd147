"""Triton's interpreter, in which kernels run on tensors of the CPU."""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

KERNELS = "gpu_worker.engine.cuda.kernels"
FUNCTIONS = ("cumsum", "max", "min", "sum")
"""Functions of Triton's own that kernels call, and that Triton compiles as it does kernels."""

SCOPES: list[Any] = []
"""What the interpreter has put into `triton.language` for each function that a kernel calls, and never takes
out: kernels would be compiled with it.
"""


def interpret_kernels(patch: pytest.MonkeyPatch) -> None:
    """Makes the modules of kernels run in the interpreter that are imported until `patch` ends."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    enter = interpreter._patch_lang

    def note(function: Any) -> Any:
        SCOPES.append(enter(function))
        return SCOPES[-1]

    patch.setattr(interpreter, "_patch_lang", note)
    patch.setenv("TRITON_INTERPRET", "1")
    for name in FUNCTIONS:
        function = getattr(triton.language.standard, name)
        patch.setattr(triton.language, name, InterpretedFunction(function.fn))
    for name in [module for module in sys.modules if module.startswith(f"{KERNELS}.")]:
        patch.delitem(sys.modules, name)


def forget_kernels() -> None:
    """Makes the next import of a module of kernels a new one, for the compiler."""
    while SCOPES:
        SCOPES.pop().restore()
    for name in [module for module in sys.modules if module.startswith(f"{KERNELS}.")]:
        del sys.modules[name]


def kernels(name: str) -> ModuleType:
    """The module of kernels of this name."""
    return importlib.import_module(f"{KERNELS}.{name}")
