"""GET /v1/models and /v1/models/{name}: the models that a request can name, for clients of OpenAI's and of
Anthropic's API, who send `anthropic-version`.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request

from api.errors import invalid, quoted
from api.http.openapi import OPENAI, OPENAI_ERRORS, Shape, answer, only
from api.requests.on_pool import pools_of
from api.requests.pool_registry import names_own
from common.adapters import PoolAdapter

MODEL = Shape(
    "Model",
    {
        "id": "SmolLM2",
        "object": "model",
        "created": 1764000000,
        "owned_by": "SmolLM2",
        "root?": "/adapters/sql",  # of a LoRA adapter, and `parent`, the model that it changes
        "parent?": "SmolLM2",
        "task?": "embed",  # of a model that makes vectors or scores
    },
)
MODEL_LIST = Shape("ModelList", {"object": "list", "data": [MODEL.example], "models": [{}]})
INFO = {"type": "model", "id": "SmolLM2", "display_name": "SmolLM2", "created_at": "2025-11-24T16:00:00Z"}
ENDS = {"first_id": ("SmolLM2", None), "last_id": ("SmolLM2", None)}
MODEL_INFO_PAGE = Shape("ModelInfoPage", {"data": [INFO], **ENDS, "has_more": False})
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
    responses=answer((MODEL_LIST, MODEL_INFO_PAGE)) | only(OPENAI_ERRORS, 400, 503),
    response_model=None,
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
    models = []
    for name in pools.served_names():  # of pools that are not open nobody knows what their model makes
        tasks = (pool.task for pool in pools.all() if names_own(name, pool.settings))
        models.append(render_model(name, next(tasks, "")))
    for pool in pools.all():
        models += [render_adapter(one, pool.settings.model_name) for one in pool.adapters.registry.ready]
    if VERSION_HEADER in request.headers:
        return page(models, limit, after_id, before_id)
    return {"object": "list", "data": models, "models": NO_CATALOGUE}


@router.get(
    "/v1/models/{name:path}",
    summary="Retrieve a model",
    responses=answer((MODEL, Shape("ModelInfo", INFO))) | only(OPENAI_ERRORS, 404, 503),
    response_model=None,
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
        found = render_model(pools.resolve(name).shown, pool.task)
    return render_info(found) if VERSION_HEADER in request.headers else found


def render_model(name: str, task: str = "") -> dict[str, Any]:
    kind = {"task": task} if task else {}
    return {"id": name, "object": "model", "created": STARTED_S, "owned_by": name, **kind}


def render_adapter(adapter: PoolAdapter, parent: str) -> dict[str, Any]:
    """An adapter as vLLM lists it; `parent` is its model."""
    shown = render_model(adapter.name) | {"created": adapter.added_ms // 1000, "owned_by": parent}
    return shown | {"root": adapter.path, "parent": parent}


# --- models -------------------------------------------------------------------------------------------------


VERSION_HEADER = "anthropic-version"
"""Clients of Anthropic's API send it with each request."""


def render_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model of OpenAI's list, as Anthropic's has it."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}


def page(
    models: Sequence[Mapping[str, Any]], limit: int, after_id: str | None, before_id: str | None
) -> dict[str, Any]:
    """Up to `limit` models after one id, or the last ones before another. Raises ApiError (422)."""
    if after_id is not None and before_id is not None:
        raise invalid("`after_id` and `before_id` exclude each other", "before_id")
    ids = [model["id"] for model in models]
    if before_id is not None:
        end = place(ids, before_id, "before_id")
        chosen, has_more = models[max(end - limit, 0) : end], end > limit
    else:
        begin = 0 if after_id is None else place(ids, after_id, "after_id") + 1
        chosen, has_more = models[begin : begin + limit], begin + limit < len(models)
    data = [render_info(model) for model in chosen]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": has_more}


def place(ids: Sequence[str], model_id: str, name: str) -> int:
    if model_id not in ids:
        raise invalid(f"`{name}` must be a model of the list. Given: {quoted(model_id)}", name)
    return ids.index(model_id)
