"""GET /version, as in vLLM. No API key is needed."""

from importlib.metadata import version

from fastapi import APIRouter

from api.http.openapi import HEALTH
from api.vllm.schemas import ServerVersion

router = APIRouter(tags=[HEALTH])


@router.get("/version", summary="Version of this server", responses={200: {"model": ServerVersion}})
async def server_version() -> dict[str, str]:
    """Returns the version of this server, not of vLLM."""
    return {"version": version("tokenfleet")}
