"""GET /v1/models and /v1/models/{name}: the models that a request can name, for clients of OpenAI's and of
Anthropic's API, who send `anthropic-version`.
"""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request

from api.anthropic.models import VERSION_HEADER, page, render_info
from api.anthropic.response_schemas import ModelInfo, ModelInfoPage
from api.http.openapi import OPENAI
from api.openai.response_schemas import ERROR_RESPONSES, Model, ModelList
from api.requests.on_pool import pools_of
from common.adapters import PoolAdapter

router = APIRouter(tags=[OPENAI])
NO_CATALOGUE: list[Any] = []
"""The field `models`, without which Codex reads no list of models. It is a catalogue of OpenAI's own models
with their system prompts; Codex uses its defaults for a model that is not in it.
"""
STARTED_S = int(time.time())
"""Unix time at which this gateway started; it stands for the creation time of its models."""
FOR_ANTHROPIC = "With the header `anthropic-version` only: "
ModelId = Annotated[str | None, Query(description=f"{FOR_ANTHROPIC}the id of a model of the list.")]


@router.get("/v1/models/", include_in_schema=False)
@router.get(
    "/v1/models",
    summary="List models",
    responses={
        200: {"model": ModelList | ModelInfoPage},
        400: ERROR_RESPONSES[400],
        503: ERROR_RESPONSES[503],
    },
)
async def list_models(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description=f"{FOR_ANTHROPIC}models on a page.")] = 20,
    after_id: ModelId = None,
    before_id: ModelId = None,
) -> dict[str, Any]:
    """Lists the model of this pool, those of other pools that have a live worker, those whose requests are
    shared out by weight, and LoRA adapters. With the header `anthropic-version` it is a page of Anthropic's
    list.
    """
    pools = pools_of(request)
    models = [render_model(name, pools.task_of(name)) for name in pools.served_names()]
    models += [render_adapter(*one) for one in pools.served_adapters()]
    if VERSION_HEADER in request.headers:
        return page(models, limit, after_id, before_id)
    return {"object": "list", "data": models, "models": NO_CATALOGUE}


@router.get(
    "/v1/models/{name:path}",
    summary="Retrieve a model",
    responses={
        200: {"model": Model | ModelInfo},
        404: ERROR_RESPONSES[404],
        503: ERROR_RESPONSES[503],
    },
)
async def retrieve_model(
    request: Request, name: Annotated[str, Path(description="One that `GET /v1/models` lists.")]
) -> dict[str, Any]:
    """Returns one of the models that GET /v1/models lists; 404 for others."""
    pools = pools_of(request)
    pool = await pools.find(name)
    if adapter := pool.adapters.find(name):
        found = render_adapter(adapter, pool.settings.model_name)
    else:
        found = render_model(pools.shown_name(name), pool.task)
    return render_info(found) if VERSION_HEADER in request.headers else found


def render_model(name: str, task: str = "") -> dict[str, Any]:
    kind = {"task": task} if task else {}
    return {"id": name, "object": "model", "created": STARTED_S, "owned_by": name, **kind}


def render_adapter(adapter: PoolAdapter, parent: str) -> dict[str, Any]:
    """An adapter as vLLM lists it; `parent` is its model."""
    shown = render_model(adapter.name) | {"created": adapter.added_ms // 1000, "owned_by": parent}
    return shown | {"root": adapter.path, "parent": parent}
