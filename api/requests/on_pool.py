"""On a pool: the step of a route that chooses which pool serves a request."""

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError, cut, invalid, model_not_found, quoted
from api.http import body
from api.http.auth import key_of
from api.http.idempotency import idempotency_key
from api.http.middleware import client_request_id, request_id
from api.requests.fields import ServedFields
from api.requests.pool import Pool
from api.requests.pool_registry import PoolRegistry, Target, check_key_adapter, check_key_model
from common.metrics.catalogue import POOL_REQUESTS

Shape = TypeVar("Shape", bound=ServedFields)
Serve = Callable[[Pool], Awaitable[Response]]
"""Serves a request with one pool. Raises ApiError before anything is sent."""


def pools_of(request: Request) -> PoolRegistry:
    return cast(PoolRegistry, request.app.state.pools)


def own_pool(request: Request) -> Pool:
    """The gateway's own pool, whatever model the request names."""
    return pools_of(request).own


async def read_body(request: Request, shape: type[Shape]) -> Shape:
    """The body of a route that names a model. Raises ApiError."""
    parsed = await body.read(request, shape, own_pool(request).max_body_bytes)
    parsed.check()
    return parsed


async def pool_for(request: Request, model: str | None = None) -> Pool:
    """A pool that serves `model`, by default the gateway's own. Raises ApiError: 403 if the request's API key
    may not use that model, and as `PoolRegistry.find`.
    """
    pools = pools_of(request)
    pool, target = await pools.find(model) if model else pools.own, pools.resolve(model)
    check_key_model(key_of(request), pool.settings, target.shown)
    check_key_adapter(key_of(request), target.adapter)
    return pool


async def on_pool(request: Request, adapter_id: str | None, model: str | None, serve: Serve) -> Response:
    """Serve a request with a pool that serves its model, or the adapter that TGI's `adapter_id` names; if
    that one has no room, once with another one. Raises ApiError: 422 if there is no such adapter.
    """
    pools = pools_of(request)
    if adapter_id is not None:
        await check_adapter_id(request, adapter_id)
    target = await pools.target(model if adapter_id is None else adapter_id)
    # what the request has in common with its repetition
    key = idempotency_key(request) or client_request_id(request.scope) or request_id(request)
    first, *others = await pools.tried(target, key)
    try:
        return await counted(request, first, target, serve)
    except ApiError as error:
        if error.error_type != "overloaded" or not others or idempotency_key(request):
            raise  # a repetition has to find its pool again
    return await counted(request, others[0], target, serve)


async def check_adapter_id(request: Request, adapter_id: str) -> None:
    """Raises ApiError (422) if there is no such adapter."""
    pools = pools_of(request)
    if not pools.resolve(adapter_id).adapter and not await pools.own.find_adapter(adapter_id):
        raise invalid(f"`adapter_id`: there is no adapter {quoted(adapter_id)}", "adapter_id")


async def counted(request: Request, pool: Pool, target: Target, serve: Serve) -> Response:
    """Serve a request with this pool, and count it if it is admitted. Raises ApiError: 403 if its API key may
    not use the pool's model, or the adapter that it names.
    """
    request.state.model_name = target.shown
    check_key_model(key_of(request), pool.settings, target.shown)
    request.state.adapter = await allowed_adapter(request, pool, target.adapter)
    response = await serve(pool)
    POOL_REQUESTS.add(1, target.shown, pool.settings.pool)
    return response


async def allowed_adapter(request: Request, pool: Pool, name: str | None) -> str:
    """The key of a pool's adapter; empty without a name. Raises ApiError: 403 if the request's API key may
    not use it, 404 if there is none, 422 if no worker will serve it.
    """
    if not name:
        return ""
    check_key_adapter(key_of(request), name)
    if (adapter := await pool.find_adapter(name)) is None:
        raise model_not_found(f"The model `{cut(name)}` does not exist")
    pool.workers.check_adapter(adapter)
    return adapter.key
