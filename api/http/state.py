"""Application state: the pools that routes find through their request."""

from typing import cast

from fastapi import Request

from api.inference.pool import Pool
from api.inference.pool_registry import PoolRegistry


def pools_of(request: Request) -> PoolRegistry:
    return cast(PoolRegistry, request.app.state.pools)


def own_pool(request: Request) -> Pool:
    """The gateway's own pool, whatever model the request names."""
    return pools_of(request).own
