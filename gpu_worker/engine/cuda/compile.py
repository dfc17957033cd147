"""Compilation of decoder layers by torch, each by itself: one compilation serves all layers that are
alike.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.process.machine import make_cache_folder

log = logging.getLogger(__name__)

UNCOMPILABLE = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
    torch._inductor.exc.InductorError,
    OSError,
)
"""Errors of torch's compiler where it cannot compile a model, or the machine lacks what it needs."""
MAX_COMPILATIONS = 64
"""Of one piece of code. A model that needs more runs uncompiled as a whole, with a warning: by itself torch
would silently leave the layers beyond its limit uncompiled.
"""


def compile_layers(model: nn.Module, attentions: Iterable[nn.Module], try_out: Callable[[], object]) -> int:
    """Compile the layers → how many. `try_out` runs steps of all kinds of shapes. If it cannot be done, all
    layers run as they are, which is slower.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_folder()))
    torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    layers = layers_of(model, attentions)
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        try_out()
    except UNCOMPILABLE as error:
        log.warning(
            "its layers are not compiled, steps are slower: %s",
            next(iter(str(error).splitlines()), type(error).__name__),
        )
        for layer in layers:
            layer._compiled_call_impl = None
        return 0
    return len(layers)


def compiled_folder() -> Path:
    """The folder where torch keeps what it compiles. By itself torch would run what it finds in a folder in
    /tmp whose name anybody can guess.
    """
    try:
        return make_cache_folder("inductor")
    except OSError:  # there is no home to write to
        return Path(tempfile.mkdtemp(prefix="tokenfleet-inductor-"))


def stop_compiling() -> None:
    """From now on run uncompiled what is not compiled yet: rows do not wait for a compiler."""
    log.info("compiled code: %d pieces", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.set_stance("eager_on_recompile")


def layers_of(model: nn.Module, attentions: Iterable[nn.Module]) -> list[Any]:
    """The numbered modules that contain the attention modules: `model.layers.3` for
    `model.layers.3.self_attn`.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, None] = {}
    for attention in attentions:
        parts = names[attention].split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            found[".".join(parts[: number + 1])] = None
    return [model.get_submodule(name) for name in found]
