"""Scripts of answers that a client comes back for."""

from redis.asyncio import Redis

from common.broker import request_scripts
from common.broker.lua import run_script
from common.broker.request_scripts import AttachReply
from tests.support.scripts import KEYS, admit, cancel, forget


async def attach(redis: Redis, *request_ids: str, gateway: str, inherited: int | None = None) -> AttachReply:
    call = request_scripts.attach(KEYS, request_ids, gateway=gateway, inherited=inherited)
    return await run_script(redis, call)


def attached(reader: int, num_requests: int = 1) -> AttachReply:
    """The reply of requests that `admit` has admitted."""
    return AttachReply("attached", reader, ["d"] * num_requests)


async def test_only_the_newest_reader_cancels_and_forgets(redis: Redis) -> None:
    await admit(redis, "r1")
    await admit(redis, "r2")
    assert await attach(redis, "r1", "r2", gateway="g2") == attached(1, 2)
    for name in ("r1", "r2"):
        assert await redis.hmget(KEYS.request(name), ["reader", "gateway"]) == [b"1", b"g2"]  # type: ignore[misc]
    assert not await cancel(redis, "r1", reader=0)
    assert not await forget(redis, "r1", reader=0)
    assert await forget(redis, "r1", reader=1)
    assert await attach(redis, "r1", "r2", gateway="g3") == AttachReply("gone")
    assert await cancel(redis, "r2", reader=1)
    assert await attach(redis, "r2", gateway="g3") == AttachReply("cancelled")


async def test_a_detached_request_has_no_gateway_whoever_reads(redis: Redis) -> None:
    await admit(redis, "r1")
    await redis.hset(KEYS.request("r1"), "gateway", "")  # type: ignore[misc]
    assert await attach(redis, "r1", gateway="g2") == attached(1)
    assert await redis.hget(KEYS.request("r1"), "gateway") == b""  # type: ignore[misc]


async def test_an_inherited_connection_yields_to_the_one_on_which_its_client_came_back(redis: Redis) -> None:
    """Heirs follow each other on one connection; one whose client has another is superseded."""
    await admit(redis, "r1")
    assert await attach(redis, "r1", gateway="g2", inherited=0) == attached(1)
    assert await attach(redis, "r1", gateway="g3", inherited=0) == attached(2)
    assert await attach(redis, "r1", gateway="g4") == attached(3)
    assert await attach(redis, "r1", gateway="g2", inherited=0) == AttachReply("superseded")
    assert await attach(redis, "r1", gateway="g2", inherited=3) == attached(4)
