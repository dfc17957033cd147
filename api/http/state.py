"""Application state: the pools that routes find through their request, and what names one in its body."""

from typing import TypeVar, cast

from fastapi import Request

from api.http import body
from api.inference.fields import ServedFields
from api.inference.pool import Pool
from api.inference.pool_registry import PoolRegistry

Shape = TypeVar("Shape", bound=ServedFields)


def pools_of(request: Request) -> PoolRegistry:
    return cast(PoolRegistry, request.app.state.pools)


def own_pool(request: Request) -> Pool:
    """The gateway's own pool, whatever model the request names."""
    return pools_of(request).own


async def pool_and_body(request: Request, shape: type[Shape]) -> tuple[Pool, Shape]:
    """The pool that serves the body's model, and the body. Raises ApiError."""
    pools = pools_of(request)
    parsed = await body.read(request, shape, pools.own.settings.payload_limit)
    parsed.check()
    return await pools.find(parsed.model), parsed
