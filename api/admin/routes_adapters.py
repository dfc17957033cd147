"""Routes of LoRA adapters: vLLM's POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and GET
/admin/adapters. They do what `tokenfleet adapters` asks for.
"""

from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from api.admin.adapter_changes import AdapterInfo, describe_adapter, load_adapter, unload_adapter
from api.errors import ApiError
from api.http import body
from api.http.openapi import FLEET, json_body, only
from api.json import fresh_json
from api.openai.response_schemas import ERROR_RESPONSES
from api.requests.fields import Strict
from api.requests.on_pool import own_pool, pools_of
from api.requests.pool import Pool
from common.settings.lora import AdapterSource

router = APIRouter(responses=only(ERROR_RESPONSES, 400, 401, 403, 404, 413, 415, 503), tags=[FLEET])
Change = TypeVar("Change", bound=Strict)
EXAMPLE = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class LoadRequest(Strict):
    """The body of /v1/load_lora_adapter."""

    lora_name: str = Field(description="The name by which requests ask for it, as `model` or `adapter_id`.")
    lora_path: str = Field(
        description="A folder that all workers can read, or a hub id, perhaps with `@revision`."
    )
    load_inplace: bool | None = Field(
        default=None, description="Take the place of an adapter of this name. Default: false."
    )


class UnloadRequest(Strict):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = Field(default=None, description="Ignored.")


class AdapterList(BaseModel):
    """All adapters of the pool, the oldest first, and the number of workers that serve adapters."""

    adapters: list[AdapterInfo]
    num_workers: int
    may_change: bool


@router.get("/admin/adapters", summary="List LoRA adapters", response_model=AdapterList)
async def list_adapters(request: Request) -> Response:
    """Returns the adapters of the pool, with those that are being loaded and unloaded."""
    pool = own_pool(request)
    await pool.adapters.refresh_unless_fresh()
    found = sorted(pool.adapters.registry.adapters.values(), key=lambda one: (one.added_ms, one.name))
    content = AdapterList(
        adapters=[describe_adapter(pool.workers, one) for one in found],
        num_workers=len(pool.workers.holders),
        may_change=why_not_changed(pool) == "",
    )
    return fresh_json(content.model_dump())


@router.post(
    "/v1/load_lora_adapter", summary="Load a LoRA adapter", openapi_extra=json_body(LoadRequest, EXAMPLE)
)
async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter on every worker of the pool, also on those that start later, and answers once all
    have it. If one refuses it, none keeps it.
    """
    parsed = await read_change(request, LoadRequest)
    source = AdapterSource(parsed.lora_name, parsed.lora_path)
    await load_adapter(pools_of(request), source, bool(parsed.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    openapi_extra=json_body(UnloadRequest, {"lora_name": "sql"}),
)
async def unload_lora_adapter(request: Request) -> Response:
    """Refuses new requests for an adapter. Those that run or wait are finished with it, then workers unload
    it.
    """
    parsed = await read_change(request, UnloadRequest)
    await unload_adapter(own_pool(request), parsed.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' removed successfully.")


async def read_change(request: Request, shape: type[Change]) -> Change:
    """The body of a change. Raises ApiError: 403 where adapters may not be changed, and those of bodies."""
    pool = own_pool(request)
    if why := why_not_changed(pool):
        raise ApiError(403, "forbidden", why)
    return await body.read(request, shape, pool.settings.payload_limit)


def why_not_changed(pool: Pool) -> str:
    """Why adapters may not be changed by requests; empty if they may, by an admin where there are keys."""
    allowed = pool.settings.allow_runtime_lora_updating
    if allowed is False:
        return "Adapters are not changed by requests here (ALLOW_RUNTIME_LORA_UPDATING)"
    if allowed is None and pool.keys.is_open:
        return "There is no admin yet: set API_KEY, or allow it to all with ALLOW_RUNTIME_LORA_UPDATING"
    return ""
