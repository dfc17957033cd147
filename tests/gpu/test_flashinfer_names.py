"""FlashInfer's own functions take what the imitation of it takes, by the same names. This needs no GPU."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine.fake_flashinfer import kernels, latents

pytestmark = pytest.mark.gpu
real = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
mla = pytest.importorskip("flashinfer.mla")

Paged = real.BatchPrefillWithPagedKVCacheWrapper
Decode = real.BatchDecodeWithPagedKVCacheWrapper
Latent = mla.BatchMLAPagedAttentionWrapper
FUNCTIONS = {
    "xqa": (kernels.xqa, real.xqa),
    "csr": (latents.MLAPlanMetadata.csr, mla.MLAPlanMetadata.csr),
}
CLASSES = {
    "prefill": (kernels.BatchPrefillWithPagedKVCacheWrapper, Paged),
    "decode": (kernels.BatchDecodeWithPagedKVCacheWrapper, Decode),
    "latents": (latents.BatchMLAPagedAttentionWrapper, Latent),
}
METHODS = {
    f"{name}.{method}": (getattr(fake, method), getattr(true, method))
    for name, (fake, true) in CLASSES.items()
    for method in ("__init__", "plan", "run", "reset_workspace_buffer")
    if hasattr(fake, method)
}
METHODS["decode.plan"] = (METHODS["decode.plan"][0], Decode._plan_impl)  # `plan` passes names on unseen


@pytest.mark.parametrize(("fake", "true"), (FUNCTIONS | METHODS).values(), ids=FUNCTIONS | METHODS)
def test_names_and_places_are_those_of_flashinfer(fake: Callable[..., Any], true: Callable[..., Any]) -> None:
    given, taken = (inspect.signature(function).parameters for function in (fake, true))
    assert set(given) <= set(taken)
    places = [name for name, one in given.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert places == list(taken)[: len(places)]
    needed = {name for name, one in taken.items() if one.default is one.empty and one.kind < one.KEYWORD_ONLY}
    assert needed - {"args"} <= set(given)
