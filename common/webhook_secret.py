"""Webhook secrets: how they look, by Standard Webhooks."""

import base64

SECRET_PREFIX = "whsec_"
MIN_SECRET, MAX_SECRET = 24, 64
"""Bytes of a secret."""


def key_of_secret(secret: str) -> bytes:
    """The bytes of a secret. Raises ValueError, which says how a secret must look."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET <= len(key) <= MAX_SECRET:
        raise ValueError(f"must be {SECRET_PREFIX} and the base64 of {MIN_SECRET} to {MAX_SECRET} bytes")
    return key
