"""FlashInfer's own functions take what the imitation of it takes, by the same names. This needs no GPU."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine import fake_flashinfer as fake

pytestmark = pytest.mark.gpu
real = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
mla = pytest.importorskip("flashinfer.mla")

Paged = real.BatchPrefillWithPagedKVCacheWrapper
Decode = real.BatchDecodeWithPagedKVCacheWrapper
Latent = mla.BatchMLAPagedAttentionWrapper
FUNCTIONS = {
    "xqa": (fake.xqa, real.xqa),
    "csr": (fake.MLAPlanMetadata.csr, mla.MLAPlanMetadata.csr),
}
CLASSES = {
    "prefill": (fake.BatchPrefillWithPagedKVCacheWrapper, Paged),
    "decode": (fake.BatchDecodeWithPagedKVCacheWrapper, Decode),
    "latents": (fake.BatchMLAPagedAttentionWrapper, Latent),
}
METHODS = {
    f"{name}.{method}": (getattr(own, method), getattr(true, method))
    for name, (own, true) in CLASSES.items()
    for method in ("__init__", "plan", "run", "reset_workspace_buffer")
    if hasattr(own, method)
}
METHODS["decode.plan"] = (METHODS["decode.plan"][0], Decode._plan_impl)  # `plan` passes names on unseen


@pytest.mark.parametrize(("own", "true"), (FUNCTIONS | METHODS).values(), ids=FUNCTIONS | METHODS)
def test_names_and_places_are_those_of_flashinfer(own: Callable[..., Any], true: Callable[..., Any]) -> None:
    given, taken = (inspect.signature(function).parameters for function in (own, true))
    assert set(given) <= set(taken)
    places = [name for name, one in given.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert places == list(taken)[: len(places)]
    needed = {name for name, one in taken.items() if one.default is one.empty and one.kind < one.KEYWORD_ONLY}
    assert needed - {"args"} <= set(given)
