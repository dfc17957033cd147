"""GET /health and /v1/models."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import Refusal
from api.gateway import gateway_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether a request would be accepted now."""
    try:
        await gateway_of(request).desk.check()
    except Refusal as refusal:
        return Refusal(503, "healthcheck", f"unhealthy: {refusal.text}").response()
    return Response()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model of this pool."""
    settings = gateway_of(request).settings
    name = settings.served_model_name or settings.model_id
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": name}]}
