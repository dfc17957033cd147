"""The API key, where the fleet has one: `Authorization: Bearer <key>`."""

import secrets

from fastapi import Request

from api.errors import unauthorised
from api.http.state import own_pool


def check_key(request: Request) -> None:
    """Raises ApiError (401) unless the client says the key."""
    key = own_pool(request).settings.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if key and not (
        scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode("latin-1"), key.encode())
    ):
        raise unauthorised()
