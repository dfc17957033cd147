"""Scripts about processes that several packages run: the lease of the active batcher, and a worker's end."""

from typing import NamedTuple

from common.broker.keys import STREAMS_TTL_MS, Keys
from common.broker.lua import Args, ScriptCall, call_script, decode_all


class LeaseReply(NamedTuple):
    """The epoch, or "" while another holder has the lease; and the id of the server that answered."""

    epoch: str
    server_id: str


def lease(
    keys: Keys, *, holder: str, ttl_ms: int, own_epoch: str, clock_ms: int | bytes
) -> ScriptCall[LeaseReply]:
    """Take, renew or release the lease of the active batcher.

    Args:
        ttl_ms: 0 releases the lease.
        own_epoch: the epoch of the holder; "" takes the lease.
        clock_ms: of the holder, what the pool's clock shows; of another, b"" or where that clock has stopped.
    """
    args: Args = {"holder": holder, "ttl_ms": ttl_ms, "own_epoch": own_epoch, "clock_ms": clock_ms}
    return call_script("lease", lambda reply: LeaseReply(*decode_all(reply)), keys, args=args)


def drain(keys: Keys, worker: str) -> ScriptCall[tuple[str, int] | None]:
    """Ask a worker to drain. The reply has its state and number of rows; None: there is no such worker."""

    def read(reply: list[bytes | None] | None) -> tuple[str, int] | None:
        return ((reply[0] or b"").decode(), int(reply[1] or 0)) if reply else None

    return call_script("drain", read, keys, worker)


def seal(keys: Keys, worker: str, *, why: str) -> ScriptCall[bool]:
    """Seal an incarnation: nothing can be appended to its streams any more. False if it has no log.

    Args:
        why: `died`, `drained` or `unreadable`.
    """
    return call_script(
        "seal", bool, keys, worker, args={"incarnation": worker, "why": why, "ttl_ms": STREAMS_TTL_MS}
    )
