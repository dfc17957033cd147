"""Socket keeper: holds a copy of each answer's socket, so that a client's connection outlives its gateway.

When a gateway ends or releases an answer, the socket and the state of the answer go to another gateway, the
heir (api/handover/). The protocol is in common/messages/kept_answer.py.
"""

import asyncio
import itertools
import logging
import resource
import socket
import sys
from collections import deque
from dataclasses import dataclass, field

from common.messages.codec import WireError, decode, encode
from common.messages.kept_answer import KeeperMessage, KeptAnswer, received
from common.process.logs import plural

log = logging.getLogger(__name__)

RETRY_S = 0.01
SPARE_HANDLES = 128
"""Handles that the launcher has open besides kept sockets."""


@dataclass(slots=True, eq=False)
class GatewayChannel:
    """The keeper's end of the channel to one run of a gateway.

    Attributes:
        takes: whether the gateway takes answers of others.
        outgoing: names of answers that it inherits, not sent to it yet.
    """

    socket: socket.socket
    takes: bool = False
    outgoing: deque[str] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class KeptSocket:
    """The copy of one answer's socket.

    Attributes:
        owner: the channel of its gateway; None while it waits for an heir, since `orphan_since_s`.
        has_left: whether the client has left, so that the socket is dropped soon.
    """

    socket: socket.socket
    answer: KeptAnswer
    owner: GatewayChannel | None
    orphan_since_s: float = 0.0
    has_left: bool = False


def max_handles() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class SocketKeeper:
    """Keeps sockets for the gateways of one launcher.

    Attributes:
        orphan_s: how long an answer waits for an heir before it is dropped.
        left_s: how long an answer is kept after its client has left: by then its requests, which go on, are
            in the broker's file.
        max_sockets: how many sockets are kept at most.
        is_full: whether that limit was reached once, and logged.
        moved: set when an answer was dropped or sent to its heir, or a gateway has ended.
    """

    def __init__(self, orphan_s: float = 30.0) -> None:
        self.orphan_s = orphan_s
        self.left_s = 2.0
        self.max_sockets = max_handles() - SPARE_HANDLES
        self.kept: dict[str, KeptSocket] = {}
        self.channels: list[GatewayChannel] = []
        self.is_full = False
        self.moved = asyncio.Event()

    def open_channel(self) -> socket.socket:
        """Open a channel for one run of a gateway. Returns the gateway's end, to pass on and close."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        channel = GatewayChannel(ours)
        self.channels.append(channel)
        asyncio.get_running_loop().add_reader(ours, self.receive_all, channel)
        return theirs

    async def wait_for_heirs(self) -> None:
        """Wait until no answer waits for an heir: each was sent to one, or was dropped."""
        for channel in [*self.channels]:
            self.receive_all(channel)
        while self.has_orphans():
            self.moved.clear()
            await self.moved.wait()

    def has_orphans(self) -> bool:
        """Whether an answer waits for an heir, or to be sent to it."""
        waiting = any(kept.owner is None for kept in self.kept.values())
        return waiting or any(channel.outgoing for channel in self.channels)

    def close(self) -> None:
        """Drop everything: from here on each connection ends with its gateway."""
        for channel in [*self.channels]:
            self.remove(channel)
        for name in [*self.kept]:
            self.drop(name)

    # --- messages -------------------------------------------------------------------------------------------

    def receive_all(self, channel: GatewayChannel) -> None:
        """Read all messages that have come from a gateway. An empty one means that the gateway has ended."""
        for data, beside in received(channel.socket):
            if not data:
                self.lose(channel)
                return
            try:
                self.obey(channel, decode(KeeperMessage, data), beside)
            except WireError as error:
                log.error("undecodable message of a gateway: %s", error)
                if beside is not None:
                    beside.close()

    def obey(self, channel: GatewayChannel, message: KeeperMessage, beside: socket.socket | None) -> None:
        if message.keep is not None:
            self.keep(channel, message.keep, beside)
        if message.drop:
            self.drop(message.drop)
        if message.left and (kept := self.kept.get(message.left)) is not None:
            kept.has_left = True
            asyncio.get_running_loop().call_later(self.left_s, self.drop_left, kept, channel)
        if message.release and (kept := self.kept.get(message.release)) is not None:
            self.orphan([kept])
        if message.takes is not None:
            channel.takes = message.takes
            self.give([kept for kept in self.kept.values() if kept.owner is None])

    def keep(self, channel: GatewayChannel, answer: KeptAnswer, beside: socket.socket | None) -> None:
        known = self.kept.get(answer.name)
        if known is not None and known.has_left and beside is not None:  # another client uses the name
            self.drop(answer.name)
            known = None
        if known is not None:
            known.answer = answer
        elif beside is not None and len(self.kept) < self.max_sockets:
            self.kept[answer.name] = KeptSocket(beside, answer, channel)
            return
        elif beside is not None and not self.is_full:
            self.is_full = True
            why = "the most possible: further streams end with their gateway"
            log.warning("%d sockets are kept, %s", self.max_sockets, why)
        if beside is not None:
            beside.close()

    def drop(self, name: str) -> None:
        if (kept := self.kept.pop(name, None)) is not None:
            kept.socket.close()
            self.moved.set()

    def drop_left(self, kept: KeptSocket, owner: GatewayChannel) -> None:
        """Drop an answer whose client has left, unless its gateway has ended meanwhile."""
        if kept.owner is owner and self.kept.get(kept.answer.name) is kept:
            self.drop(kept.answer.name)

    # --- heirs ----------------------------------------------------------------------------------------------

    def lose(self, channel: GatewayChannel) -> None:
        """Find heirs for the answers of a gateway that has ended."""
        self.remove(channel)
        orphans = [kept for kept in self.kept.values() if kept.owner is channel]
        if orphans:
            log.info("another gateway goes on with %s of one that ended", plural(len(orphans), "answer"))
            self.orphan(orphans)

    def remove(self, channel: GatewayChannel) -> None:
        if channel in self.channels:
            self.channels.remove(channel)
            asyncio.get_running_loop().remove_reader(channel.socket)
            channel.socket.close()
            self.moved.set()  # nothing waits to be sent to it any more

    def orphan(self, orphans: list[KeptSocket]) -> None:
        """Take answers from their gateways and give them to heirs; if there is none, they wait for one."""
        loop = asyncio.get_running_loop()
        for kept in orphans:
            kept.owner, kept.orphan_since_s = None, loop.time()
        if not self.give(orphans):
            loop.call_later(self.orphan_s, self.drop_old, orphans)

    def drop_old(self, orphans: list[KeptSocket]) -> None:
        """Drop those that have waited for an heir for `orphan_s`."""
        until_s = asyncio.get_running_loop().time() - self.orphan_s
        for kept in orphans:
            if kept.owner is None and kept.orphan_since_s <= until_s:
                self.drop(kept.answer.name)

    def give(self, orphans: list[KeptSocket]) -> bool:
        """Spread answers over the gateways that take them. Returns whether there are any."""
        heirs = [channel for channel in self.channels if channel.takes]
        for kept, heir in zip(orphans, itertools.cycle(heirs), strict=False):
            kept.owner = heir
            heir.outgoing.append(kept.answer.name)
        for heir in heirs:
            self.send_all(heir)
        return bool(heirs)

    def send_all(self, heir: GatewayChannel) -> None:
        """Send a gateway the answers that it inherits. The rest goes when the channel has room again."""
        while heir.outgoing and heir in self.channels:
            kept = self.kept.get(heir.outgoing[0])
            if kept is not None and kept.owner is heir:
                try:
                    socket.send_fds(heir.socket, [encode(kept.answer)], [kept.socket.fileno()])
                except ConnectionError:
                    return  # the gateway has ended, which `receive_all` will find
                except OSError as error:  # there is no room, or too many handles are in flight
                    log.debug("an answer is sent to its heir later: %s", error)
                    asyncio.get_running_loop().call_later(RETRY_S, self.send_all, heir)
                    return
            heir.outgoing.popleft()
            self.moved.set()
