"""Keep: the bytes of pictures in the broker, beside the requests that have them. Workers read them there."""

from collections.abc import Iterable
from typing import Literal

from api.errors import ApiError, asking_broker, overloaded
from api.pictures.load import LoadedPicture
from common.broker.keys import Keys
from common.broker.lua import Args, ScriptCall, call_script
from common.broker.pool_client import PoolClient
from common.messages.request import Generate

PICTURE_GONE = "picture_gone"
"""Type of the error of a request whose picture the broker has lost."""
HELD_MARGIN_MS = 600_000
"""How much longer than its request a picture is kept if no gateway lives to let go of it: deadlines are told
by a clock that stops while no batcher works.
"""


class PictureKeeper:
    """Keeps the pictures of one pool, each once."""

    def __init__(self, client: PoolClient, max_bytes: int) -> None:
        self.client = client
        self.max_bytes = max_bytes

    async def keep(self, pictures: Iterable[LoadedPicture]) -> None:
        """Keep pictures for a moment. Raises ApiError: 429, 503."""
        for picture in {one.digest: one for one in pictures}.values():
            if await self.offer(picture.digest, b"") == "missing":  # most bytes of a second turn are there
                outcome = await self.offer(picture.digest, picture.content)
                if outcome == "full":
                    raise overloaded(": the pictures of live requests take all room")

    async def offer(self, digest: str, content: bytes) -> str:
        call = keep_picture(self.client.keys, digest, content=content, max_bytes=self.max_bytes)
        async with asking_broker():
            return await self.client.run(call)

    async def hold(self, request: Generate) -> None:
        """Keep a request's pictures while it lives; called before it is admitted. Raises ApiError (503)."""
        call = hold_pictures(
            self.client.keys,
            request.request_id,
            digests_of(request),
            life_ms=request.ttl_ms + HELD_MARGIN_MS,
        )
        if not await self.client.run(call):
            text = "the broker has lost a picture of the request: send it again"
            raise ApiError(503, PICTURE_GONE, text, code=PICTURE_GONE)

    async def let_go(self, request: Generate) -> None:
        """A request with pictures has ended. Raises what the broker raises."""
        await self.client.run(let_go_pictures(self.client.keys, request.request_id, digests_of(request)))


def digests_of(request: Generate) -> list[str]:
    return [picture.digest for picture in request.pictures]


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
