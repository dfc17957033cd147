"""GET /v1/models and /v1/models/{name}: the models that a request can name."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from api.errors import asking_broker
from api.http.openapi import OPENAI
from api.inference.pool_registry import pools_of
from api.openai.response_schemas import ERROR_RESPONSES, Model, ModelList

router = APIRouter(tags=[OPENAI])
STARTED = int(time.time())
"""Unix time at which this gateway started, which stands for the time at which its models were created."""


@router.get("/v1/models/", include_in_schema=False)
@router.get(
    "/v1/models", summary="List models", responses={200: {"model": ModelList}, 503: ERROR_RESPONSES[503]}
)
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the model of this pool, and those of other pools that have a live worker."""
    pools = pools_of(request)
    settings = pools.own.settings
    async with asking_broker():
        others = await pools.names_of_others()
    names = (*(settings.served_model_name or (settings.model_id,)), *others)
    return {"object": "list", "data": [render_model(name) for name in names]}


@router.get(
    "/v1/models/{name:path}",
    summary="Retrieve a model",
    responses={200: {"model": Model}, 404: ERROR_RESPONSES[404], 503: ERROR_RESPONSES[503]},
)
async def retrieve_model(
    request: Request, name: Annotated[str, Path(description="One that `GET /v1/models` lists.")]
) -> dict[str, Any]:
    """Returns one of the models that GET /v1/models lists; 404 for others."""
    pool = await pools_of(request).find(name)
    return render_model(pool.settings.model_name)


def render_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": name}
