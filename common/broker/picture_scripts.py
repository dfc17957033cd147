"""Scripts of pictures: one function for each Lua script that gateways run for the pictures of prompts."""

from collections.abc import Iterable
from typing import Literal

from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script


def keep_picture(
    keys: Keys, digest: str, *, content: bytes, max_bytes: int
) -> ScriptCall[Literal["kept", "missing", "full"]]:
    """Keep a picture's bytes until a request holds it, for a moment.

    Args:
        content: b"" to ask whether the bytes are there.
        max_bytes: of all pictures of the pool.
    """
    args: Args = {"digest": digest, "content": content, "max_bytes": max_bytes}
    return call_script("keep_picture", lambda reply: reply.decode(), keys, digest, args=args)


def hold_pictures(keys: Keys, request_id: str, digests: Iterable[str], *, life_ms: int) -> ScriptCall[bool]:
    """Keep a request's pictures while it lives. False if one of them is not there."""
    each = [*dict.fromkeys(digests)]
    args: Args = {"request_id": request_id, "life_ms": life_ms}
    return call_script(
        "hold_pictures", bool, keys, args=args, more_keys=picture_keys(keys, each), more_args=each
    )


def let_go_pictures(keys: Keys, request_id: str, digests: Iterable[str]) -> ScriptCall[bool]:
    """Let go of the pictures of a request that has ended."""
    each = [*dict.fromkeys(digests)]
    args: Args = {"request_id": request_id}
    return call_script(
        "let_go_pictures", bool, keys, args=args, more_keys=picture_keys(keys, each), more_args=each
    )


def picture_keys(keys: Keys, digests: Iterable[str]) -> list[str]:
    """Return the keys of each picture: its bytes, and who holds them."""
    return [key for digest in digests for key in (keys.picture(digest), keys.picture_holders(digest))]
