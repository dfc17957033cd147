"""API key: checks `Authorization: Bearer <key>` if the fleet has a key."""

import secrets

from fastapi import Request

from api.errors import ApiError
from api.http.state import own_pool


def check_key(request: Request) -> None:
    """Raises ApiError (401) unless the client sent the key."""
    key = own_pool(request).settings.api_key
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if key and not (
        scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode("latin-1"), key.encode())
    ):
        why = "Incorrect API key: expected the header `Authorization: Bearer <key>`"
        raise ApiError(401, "unauthorized", why)
