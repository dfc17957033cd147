"""A gateway of a tiny encoder, with a scripted worker that computes what transformers does."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer

from api.app import Gateway
from api.prompts.tokenizer import ModelTokenizer
from common.messages.records import pack_floats, unpack_ids
from common.messages.request import Generate
from common.settings.settings import Settings
from gpu_worker.engine.batch.row import RowSlice
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, at_work

NOTHING = Answer([], ends=False)


@torch.inference_mode()
def pooled(model: Any, request: Generate) -> torch.Tensor:
    """The score of a reranker, else the mean of the hidden states: float32 [size]"""
    ids, pooling = unpack_ids(request.prompt_ids), request.pooling
    assert pooling is not None
    start = pooling.pair_start or len(ids)
    types = torch.tensor([[int(place >= start) for place in range(len(ids))]])
    output = model(input_ids=torch.tensor([ids]), token_type_ids=types)
    if "logits" in output:
        return output.logits[0]  # type: ignore[no-any-return]
    return output.last_hidden_state[0].mean(0)  # type: ignore[no-any-return]


class VectorWorker(FakeWorker):
    """Ends each request with its vector."""

    def __init__(self, url: str, tokenizer: Tokenizer, model: Any, pooling: str, pool: str) -> None:
        super().__init__(url, tokenizer, lambda _: NOTHING, pool=pool)
        self.model = model
        self.pooling = pooling

    def logits(self, request: Generate, one: RowSlice) -> list[tuple[int, int, bytes]]:
        first, vector = one.returned_logits.start, pooled(self.model, request).flatten().tolist()
        return [(one.row.number, first, pack_floats(vector))] if one.kv_len == len(one.row.ids) else []


@contextlib.asynccontextmanager
async def pooling_gateway(
    url: str, folder: Path, model: Any, pooling: str = "embed", pool: str = "default", **settings: Any
) -> AsyncIterator[tuple[VectorWorker, Gateway, httpx.AsyncClient]]:
    """A worker of this model, which lies in the folder, a gateway that is ready, and a client."""
    known = {"model_id": str(folder), "served_model_name": ("tiny",), "pool": pool, **settings}
    tokenizer = ModelTokenizer(Settings(**known))
    async with (
        at_work(VectorWorker(url, tokenizer.backend, model, pooling, pool)) as worker,
        serving(url, tokenizer=tokenizer, **known) as (gateway, client),
    ):
        await ready(gateway)
        yield worker, gateway, client
