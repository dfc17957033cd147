import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test begins without compiled code, and gives the GPU's memory back."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
