"""The ASGI application of a gateway: its routes, and how errors are answered."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api import routes_generate, routes_models
from api.errors import Refusal, answer_crash, answer_http, answer_nobody, answer_refusal
from api.gateway import Gateway


def build(gateway: Gateway) -> FastAPI:
    """The application; the gateway runs from its start-up to its shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(title="Tokenfleet", lifespan=lifespan, redirect_slashes=False)
    app.state.gateway = gateway
    app.include_router(routes_generate.router)
    app.include_router(routes_models.router)
    app.add_exception_handler(Refusal, answer_refusal)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_exception_handler(Exception, answer_crash)
    return app
