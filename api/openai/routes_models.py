"""GET /v1/models and /v1/models/{name}: the models that a request can name."""

from typing import Any

from fastapi import APIRouter, Request

from api.errors import asking_broker
from api.http.openapi import OPENAI
from api.http.state import pools_of
from api.openai.response_schemas import ERROR_RESPONSES, Model, ModelList

router = APIRouter(tags=[OPENAI])


@router.get(
    "/v1/models", summary="List models", responses={200: {"model": ModelList}, 503: ERROR_RESPONSES[503]}
)
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the model of this pool, and those of other pools that have a live worker."""
    pools = pools_of(request)
    async with asking_broker():
        others = await pools.names_of_others()
    return {
        "object": "list",
        "data": [render_model(name) for name in (pools.own.settings.model_name, *others)],
    }


@router.get(
    "/v1/models/{name:path}",
    summary="Retrieve a model",
    responses={200: {"model": Model}, 404: ERROR_RESPONSES[404], 503: ERROR_RESPONSES[503]},
)
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """Returns one of the models that GET /v1/models lists; 404 for others."""
    pool = await pools_of(request).find(name)
    return render_model(pool.settings.model_name)


def render_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": name}
