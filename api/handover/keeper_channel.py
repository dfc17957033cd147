"""Keeper channel: a gateway's end of the channel to the launcher's socket keeper. A gateway that was started
alone has no keeper.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from common.messages.codec import WireError, decode, encode
from common.messages.kept_answer import (
    HANDLE_VARIABLE,
    MAX_DATAGRAM_BYTES,
    KeeperMessage,
    KeptAnswer,
    received,
)

log = logging.getLogger(__name__)

Inherit = Callable[[KeptAnswer, socket.socket], None]
"""Continues an answer of another gateway, on its socket."""


def refuse(answer: KeptAnswer, connection: socket.socket) -> None:
    """Leave the answer to the keeper, which gives it to another gateway when this one ends."""
    connection.close()


class KeeperChannel:
    """The channel; `is_open` says whether there is a keeper.

    Attributes:
        inherit: continues answers of other gateways.
        handovers: a function for each answer whose socket is kept, which hands it over to another gateway.
        outgoing: datagrams that are not sent yet, each with the socket to send beside it, and the future of
            its sender.
    """

    def __init__(self, channel: socket.socket | None) -> None:
        self.channel = channel
        self.inherit: Inherit = refuse
        self.handovers: set[Callable[[], None]] = set()
        self.outgoing: deque[tuple[bytes, socket.socket | None, asyncio.Future[None]]] = deque()
        if channel is not None:
            channel.setblocking(False)

    @property
    def is_open(self) -> bool:
        return self.channel is not None

    def listen(self, inherit: Inherit) -> None:
        """Receive answers of other gateways from now on."""
        if self.channel is not None:
            self.inherit = inherit
            asyncio.get_running_loop().add_reader(self.channel, self.receive_all)
            self.post(KeeperMessage(takes=True))

    def is_kept(self) -> bool:
        """Whether there is still a keeper: the launcher closes it before it ends the fleet."""
        self.receive_all()
        return self.is_open

    def hand_over(self) -> None:
        """Hand all kept answers over to other gateways, and receive none any more."""
        if self.inherit is not refuse:
            self.inherit = refuse
            self.post(KeeperMessage(takes=False))
        for hand_over in [*self.handovers]:
            hand_over()

    def receive_all(self) -> None:
        for data, beside in received(self.channel) if self.channel is not None else ():
            if not data:
                self.close()
            elif beside is not None:
                try:
                    self.inherit(decode(KeptAnswer, data), beside)
                except WireError as error:
                    log.error("undecodable answer of another gateway: %s", error)
                    beside.close()

    def close(self) -> None:
        """Close the channel: there is no keeper any more."""
        if self.channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self.channel)
            loop.remove_writer(self.channel)
            self.channel.close()
            self.channel = None
        while self.outgoing:
            self.settle_first(ConnectionError("the socket keeper has gone"))

    # --- sending --------------------------------------------------------------------------------------------

    def post(self, message: KeeperMessage, beside: socket.socket | None = None) -> asyncio.Future[None]:
        """Send a message as soon as there is room, in order. The future is done when the kernel has the
        message; it may have an OSError.
        """
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(ignore_failure)
        data = encode(message)
        if self.channel is None:
            future.set_exception(ConnectionError("there is no socket keeper"))
        elif len(data) > MAX_DATAGRAM_BYTES:
            future.set_exception(OSError(f"a message of {len(data)} bytes is too long for the socket keeper"))
        else:
            self.outgoing.append((data, beside.dup() if beside else None, future))
            if len(self.outgoing) == 1:
                self.send_all()
        return future

    def send_now(self, message: KeeperMessage) -> bool:
        """Send a message only if that is possible at once. Returns whether the kernel has it."""
        if self.channel is None or self.outgoing:
            return False
        try:
            self.channel.send(encode(message))
        except OSError:
            return False
        return True

    def send_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self.outgoing and self.channel is not None:
            data, beside, _ = self.outgoing[0]
            try:
                socket.send_fds(self.channel, [data], [beside.fileno()] if beside else [])
            except BlockingIOError:
                loop.add_writer(self.channel, self.send_all)
                return
            except OSError as error:
                self.settle_first(error)
                if isinstance(error, ConnectionError):
                    self.close()
            else:
                self.settle_first(None)
        if self.channel is not None:
            loop.remove_writer(self.channel)

    def settle_first(self, error: OSError | None) -> None:
        """Remove the first datagram: it was sent, or failed with `error`."""
        _, beside, future = self.outgoing.popleft()
        if beside is not None:
            beside.close()
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)


def ignore_failure(future: asyncio.Future[None]) -> None:
    """Mark the failure as seen: asyncio logs no failure for senders that do not wait."""
    if not future.cancelled():
        future.exception()


def inherited_channel() -> KeeperChannel:
    """The channel to the keeper, as the launcher has passed it to this process."""
    handle = os.environ.pop(HANDLE_VARIABLE, "")
    with contextlib.suppress(ValueError, OSError):
        return KeeperChannel(socket.socket(fileno=int(handle)))
    return KeeperChannel(None)
