"""Adapter changes: an adapter is loaded on every ready worker of a pool before requests get it. One that was
unloaded stays until the last request that has it is over.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from api.errors import ApiError, asking_broker, invalid, quoted, unavailable
from api.http import body
from api.http.openapi import FLEET, OPENAI_ERRORS, Shape, answer, json_body, only
from api.json import fresh_json
from api.requests.fields import Strict
from api.requests.pool import Pool, PoolRegistry
from api.requests.service_terms import own_pool, pools_of
from common.adapter_registry import AdapterRegistry, change_registry
from common.adapters import AdapterFault, HeldAdapters, PoolAdapter, find_adapter
from common.broker.pool_client import ChangeRefused
from common.ids import ADAPTER_NAME
from common.settings.types import AdapterSource

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
LOOK_S = 0.1
MAX_PATH_CHARS = 4096


def describe_adapter(holders: Mapping[str, HeldAdapters], adapter: PoolAdapter) -> dict[str, Any]:
    """What people see of an adapter. `state` is `ready`; `loading` until all workers have it, `leaving` while
    the last requests with it run. `refused` has the causes of workers that cannot serve it.
    """
    return {
        **{
            name: getattr(adapter, name) for name in ("name", "path", "state", "rank", "base_model", "digest")
        },
        "added_at": adapter.added_ms // 1000,
        "num_workers": sum(adapter.key in held.loaded for held in holders.values()),
        "refused": {name: why for name, held in holders.items() if (why := held.why_not(adapter))},
    }


async def load_adapter(pools: PoolRegistry, source: AdapterSource, in_place: bool) -> PoolAdapter:
    """Load an adapter on all workers of the gateway's own pool. If one of them refuses it, all unload it.
    Raises ApiError.

    Args:
        in_place: it may take the place of another one of its name, whose live requests go on with that one.
    """
    pool = pools.own
    if not ADAPTER_NAME.fullmatch(source.name):
        words = "must be 1 to 128 letters, digits and . _ / : + -"
        raise invalid(f"`lora_name` {words}. Given: {quoted(source.name)}", "lora_name")
    if not 0 < len(source.path) <= MAX_PATH_CHARS:
        raise invalid(f"`lora_path` must have 1 to {MAX_PATH_CHARS} characters", "lora_path")
    if pools.is_model(source.name):
        raise invalid(f"`lora_name`: {quoted(source.name)} is the name of a model", "lora_name")
    await pool.admission.check()
    try:
        adapter = await asyncio.to_thread(find_adapter, source)
    except AdapterFault as fault:
        raise invalid(f"`lora_path`: {fault}", "lora_path") from fault
    check_rank(pool, adapter)
    known = await pool.find_adapter(adapter.name)
    if known and in_place and known.key == adapter.key and not known.failure:
        return known
    try:
        async with asking_broker():
            await change_registry(pool.client, lambda found: found.with_loading(adapter, in_place))
        return await wait_until_loaded(pool, adapter)
    except ChangeRefused as error:
        raise ApiError(400, "validation", f"The adapter cannot be loaded: {error}", "lora_name") from error


async def wait_until_loaded(pool: Pool, adapter: PoolAdapter) -> PoolAdapter:
    """Wait for all ready workers, then let requests have the adapter; if that fails, take it back. Raises
    ApiError, ChangeRefused.
    """
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            while not all_have(pool, adapter):
                await asyncio.sleep(LOOK_S)
                await pool.workers.refresh_unless_fresh()
                await pool.adapters.refresh_unless_fresh()
        async with asking_broker():
            await change_registry(pool.client, lambda found: found.with_ready(adapter.key))
    except BaseException as error:
        await asyncio.shield(take_back(pool, adapter))
        if isinstance(error, TimeoutError):
            raise unavailable(f"not all workers have loaded it within {LOAD_TIMEOUT_S:.0f} s") from error
        raise
    await pool.adapters.refresh()
    log.info("the adapter %s is loaded from %s", adapter.key, adapter.path)
    return adapter


async def take_back(pool: Pool, adapter: PoolAdapter) -> None:
    async with asking_broker():
        await change_registry(pool.client, lambda found: found.without_key(adapter.key))


async def unload_adapter(pool: Pool, name: str) -> None:
    """Give requests an adapter no more. Raises ApiError: 404 if there is none."""

    def without(found: AdapterRegistry) -> AdapterRegistry:
        if found.named(name) is None:
            raise ChangeRefused(f"There is no adapter {quoted(name)}", True)
        return found.without_name(name)

    try:
        async with asking_broker():
            await change_registry(pool.client, without)
    except ChangeRefused as error:
        raise ApiError(404 if error.is_unknown else 409, "not_found", str(error), "lora_name") from error
    await pool.adapters.refresh()
    log.info("the adapter %s is unloaded", name)


# --- checks -------------------------------------------------------------------------------------------------


def check_rank(pool: Pool, adapter: PoolAdapter) -> None:
    """Raises ApiError: 422 if the workers serve no adapters, or none of this rank; 503 without a worker. An
    adapter that was made for another model may fit all the same.
    """
    (_, most), settings = pool.workers.adapter_room, pool.settings
    if not pool.workers.num_ready:
        raise unavailable("no worker is ready")
    if not pool.workers.holders:
        raise invalid("The workers of this pool serve no adapters", "lora_name")
    if adapter.rank > most:
        raise invalid(f"`lora_path`: its rank is {adapter.rank}; MAX_LORA_RANK is {most}", "lora_path")
    if adapter.base_model and adapter.base_model not in (*settings.served_model_name, settings.model_id):
        log.warning("the adapter %s was made for the model %s", adapter.name, adapter.base_model)


def all_have(pool: Pool, adapter: PoolAdapter) -> bool:
    """Whether all ready workers have loaded an adapter. Raises ApiError (422) if one of them refuses it."""
    known = pool.adapters.registry.adapters.get(adapter.key)
    if known and known.added_ms == adapter.added_ms and known.failure:
        raise invalid(f"`lora_path`: {known.failure}", "lora_path")
    for incarnation, held in pool.workers.holders.items():
        if why := held.why_not(adapter):
            raise invalid(f"`lora_path`: the worker {incarnation} refuses it: {why}", "lora_path")
    return bool(pool.workers.holders) and all(
        adapter.key in held.loaded for held in pool.workers.holders.values()
    )


# --- routes adapters ----------------------------------------------------------------------------------------


router = APIRouter(responses=only(OPENAI_ERRORS, 400, 401, 403, 404, 413, 415, 503), tags=[FLEET])
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


ADAPTER = Shape("AdapterInfo", describe_adapter({}, PoolAdapter("sql", "/adapters/sql", "5f0f8c0e")))
ADAPTERS = Shape("AdapterList", {"adapters": [ADAPTER], "num_workers": 2, "may_change": True})


@router.get("/admin/adapters", summary="List LoRA adapters", responses=answer(ADAPTERS))
async def list_adapters(request: Request) -> Response:
    """Returns the adapters of the pool, the oldest first, with those that are being loaded and unloaded, and
    the number of workers that serve adapters.
    """
    pool = own_pool(request)
    await pool.adapters.refresh_unless_fresh()
    found = sorted(pool.adapters.registry.adapters.values(), key=lambda one: (one.added_ms, one.name))
    adapters = [describe_adapter(pool.workers.holders, one) for one in found]
    num_workers, may_change = len(pool.workers.holders), why_not_changed(pool) == ""
    return fresh_json({"adapters": adapters, "num_workers": num_workers, "may_change": may_change})


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
