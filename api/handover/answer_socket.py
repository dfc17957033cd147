"""Answer sockets: the launcher's keeper has a copy of each, so another gateway can go on with the answer.
The channel to the keeper, which a gateway that was started alone lacks; and what writes an answer's rest.
"""

import asyncio
import contextlib
import io
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.sse import CYCLE, bytes_written
from common.messages.codec import WireError, decode, encode
from common.messages.kept_answer import (
    HANDLE_VARIABLE,
    MAX_DATAGRAM_BYTES,
    KeeperMessage,
    KeptAnswer,
    received,
)
from common.process.logs import warn_once

log = logging.getLogger(__name__)

RETRY_S = 0.005
"""Pause before a message that has found no room is tried again."""
TELL_S = 5.0
"""How long a message, such as an answer's head, waits for a keeper that does not read: it may be stopped, or
the machine overloaded. Then none waits until there is room again.
"""
LATE_S = 1.0
"""Pause before messages for which nobody waits are tried again."""
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
        turn: that of the message which is sent next.
        is_stuck: the keeper has not read for TELL_S.
        late: messages that it gets when it reads again.
    """

    def __init__(self, channel: socket.socket | None) -> None:
        self.channel = channel
        self.inherit: Inherit = refuse
        self.handovers: set[Callable[[], None]] = set()
        self.turn = asyncio.Lock()
        self.is_stuck = False
        self.late: deque[KeeperMessage] = deque()
        if channel is not None:
            channel.setblocking(False)

    @property
    def is_open(self) -> bool:
        return self.channel is not None

    async def listen(self, inherit: Inherit) -> None:
        """Receive answers of other gateways from now on."""
        if self.channel is not None:
            self.inherit = inherit
            asyncio.get_running_loop().add_reader(self.channel, self.receive_all)
            await self.tell(KeeperMessage(takes=True))

    def is_kept(self) -> bool:
        """Whether there is still a keeper: the launcher closes it before it ends the fleet."""
        self.receive_all()
        return self.is_open

    def hand_over(self) -> None:
        """Hand all kept answers over to other gateways, and receive none any more."""
        if self.inherit is not refuse:
            self.inherit = refuse
            self.send_now(KeeperMessage(takes=False))
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
            asyncio.get_running_loop().remove_reader(self.channel)
            self.channel.close()
            self.channel = None

    # --- sending --------------------------------------------------------------------------------------------

    async def send(self, message: KeeperMessage, beside: socket.socket | None = None) -> None:
        """Send a message, after those before it and when there is room. Raises OSError, such as TimeoutError
        where there is none.
        """
        data = encode(message)
        if len(data) > MAX_DATAGRAM_BYTES:
            raise OSError(f"a message of {len(data)} bytes is too long for the socket keeper")
        async with self.turn:
            until_s = time.monotonic() + TELL_S
            while not self.try_send(data, beside):  # only the kernel knows
                if self.is_stuck or time.monotonic() > until_s:
                    self.is_stuck = True
                    raise TimeoutError("the socket keeper does not read")
                await asyncio.sleep(RETRY_S)
            self.is_stuck = False

    async def tell(self, message: KeeperMessage) -> None:
        """Send a message, if there is a keeper; later if it does not read."""
        try:
            await self.send(message)
        except TimeoutError:
            self.late.append(message)
            if len(self.late) == 1:
                self.sending = asyncio.create_task(self.send_late())
        except OSError:
            pass

    async def send_late(self) -> None:
        while self.late and self.is_open:
            await asyncio.sleep(LATE_S)
            with contextlib.suppress(OSError):
                while self.late:
                    await self.send(self.late[0])
                    self.late.popleft()

    def send_now(self, message: KeeperMessage) -> bool:
        """Send a message only if that is possible at once. Returns whether the kernel has it."""
        with contextlib.suppress(OSError):
            return not self.turn.locked() and self.try_send(encode(message))
        return False

    def try_send(self, data: bytes, beside: socket.socket | None = None) -> bool:
        """Send a datagram if there is room. Returns whether there was. Raises OSError."""
        if self.channel is None:
            raise ConnectionError("there is no socket keeper")
        try:
            socket.send_fds(self.channel, [data], [beside.fileno()] if beside else [])
        except BlockingIOError:
            return False
        except ConnectionError:
            self.close()
            raise
        return True


def inherited_channel() -> KeeperChannel:
    """The channel to the keeper, as the launcher has passed it to this process."""
    handle = os.environ.pop(HANDLE_VARIABLE, "")
    with contextlib.suppress(ValueError, OSError):
        return KeeperChannel(socket.socket(fileno=int(handle)))
    return KeeperChannel(None)


# --- rest of an answer --------------------------------------------------------------------------------------


class RestOfAnswer:
    """Skips the first `num_written` bytes, and inserts the comments that the predecessor has sent.

    Attributes:
        comment: a comment's bytes in the body.
        position: offset in the answer up to which it was rendered.
        comments: offsets of the comments that are not inserted yet.
    """

    def __init__(self, transport: Any, num_written: int, comment: bytes, comments: Sequence[int]) -> None:
        self.transport = transport
        self.num_written = num_written
        self.comment = comment
        self.comments = [*comments]
        self.position = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    @property
    def is_behind(self) -> bool:
        """Whether the predecessor has written more than was rendered."""
        return self.position < self.num_written

    @property
    def untouched(self) -> Any:
        """The connection, while no byte of the answer is written on it; else None."""
        return None if max(self.position, self.num_written) > 0 else self.transport

    def write(self, data: bytes) -> None:
        """Write the new bytes of `data`: the head, a chunk, or a whole body."""
        self.insert_comments()
        self.put(data)

    def insert_comments(self) -> None:
        while self.comments and self.comments[0] <= self.position:
            if self.comments.pop(0) < self.position:
                self.cut("a comment is in the middle of a chunk")
            self.put(self.comment)

    def put(self, data: bytes) -> None:
        num_skipped = min(max(0, self.num_written - self.position), len(data))
        self.position += len(data)
        if num_skipped < len(data) and not self.transport.is_closing():
            self.transport.write(data[num_skipped:])

    def close(self) -> None:
        """Close the connection: the whole answer is rendered."""
        if self.is_behind and not self.transport.is_closing():
            self.cut(f"{self.num_written} bytes were written, {self.position} are rendered")
        self.transport.close()

    def cut(self, why: str) -> None:
        """Cut the connection: the bytes rendered here differ from those that were written."""
        log.error("an inherited answer is cut: %s", why)
        self.transport.abort()


# --- answer socket ------------------------------------------------------------------------------------------


ANSWER_SOCKET = "answer_socket"
"""Key of a request's state: its AnswerSocket."""
INHERITED = "inherited"
"""Key of a request's state: the KeptAnswer of another gateway, which is written on its connection."""
FORMAT = "6"
"""Version of the bytes that this code renders. It changes with every change of frames, chunks or whole
responses: a gateway of another format cannot go on in the middle of an answer.
"""
KEPT_HEADERS = (b"origin", b"x-request-id")
"""Headers of a request that the head of its response depends on."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response, which may come before the head of a response; clients of HTTP/1.1 skip it."""


class AnswerSocket:
    """The socket of one answer, as its gateway sees it.

    Attributes:
        cycle: the server's object for this request; it has the transport and its flow control.
        answer: what the keeper is told; None if the socket is not kept.
        is_told: whether the keeper knows of the answer.
        ends: called when the kernel has every byte of the answer, so that a death of the gateway loses none
            of them, or when it ends in another way.
        is_handed_over: whether another gateway goes on with it.
        is_closed: set when this gateway can write nothing more to a socket that it has handed over.
    """

    def __init__(self, channel: KeeperChannel, cycle: Any, answer: KeptAnswer | None = None) -> None:
        self.channel = channel
        self.cycle = cycle
        self.answer = answer
        self.is_told = False
        self.ends: list[Callable[[], None]] = []
        if answer is not None:  # inherited
            self.is_told = True
            channel.handovers.add(self.hand_over)
        self.is_handed_over = False
        self.is_closed = asyncio.Event()

    # --- beginning ------------------------------------------------------------------------------------------

    async def keep(self, kept: KeptAnswer) -> None:
        """Have the socket kept. A stream's is kept when its head is known; a whole answer's, which has no
        comments, at once.
        """
        if self.answer is not None or not self.channel.is_open:
            return
        await flush(self.cycle)
        if self.cycle.disconnected:
            return
        scope = self.cycle.scope
        try:
            base = bytes_written(self.cycle.transport.get_extra_info("socket"))
        except OSError as error:
            warn_once(log, f"streams end with this gateway: {error}")
            return
        headers = [(name, value) for name, value in scope["headers"] if name in KEPT_HEADERS]
        self.answer = replace(kept, base=base, headers=headers, http_version=scope["http_version"])
        if not kept.comment:
            await self.tell(self.answer)

    async def start(self, message: Message, send: Send) -> None:
        """Tell the keeper the bytes of the response's head, then write them."""
        if self.answer is None:
            await send(message)
            return
        await self.cycle.flow.drain()
        transport, written = self.cycle.transport, io.BytesIO()
        self.cycle.transport = written
        try:
            await send(message)
        finally:
            self.cycle.transport = transport
        if not self.answer.head:
            await self.tell(replace(self.answer, head=written.getvalue()))
        if not self.cycle.disconnected:
            transport.write(self.answer.head if self.answer else written.getvalue())

    async def tell(self, answer: KeptAnswer) -> None:
        """Tell the keeper of an answer. If that fails, its socket is not kept."""
        is_new, self.answer = not self.is_told, answer
        self.channel.handovers.add(self.hand_over)
        own = self.cycle.transport.get_extra_info("socket")
        try:
            # a copy: the client may leave before it is sent
            with contextlib.closing(own.dup()) if is_new else contextlib.nullcontext() as beside:
                await self.channel.send(KeeperMessage(keep=answer), beside)
            self.is_told = True
        except OSError as error:
            if self.channel.is_open:  # else the whole fleet ends, and the launcher has closed it
                warn_once(log, f"a stream ends with this gateway: {error}")
            await self.drop()

    async def drop(self) -> None:
        """Have the socket kept no more."""
        if (answer := self.answer) is not None:
            self.channel.handovers.discard(self.hand_over)
            self.answer = None
            if self.is_told:
                await self.channel.tell(KeeperMessage(drop=answer.name))

    # --- middle ---------------------------------------------------------------------------------------------

    def may_comment(self) -> bool:
        """Whether a keep-alive comment may be written now, without waiting. The keeper is told its offset."""
        if self.cycle.flow.write_paused:
            return False  # there is more to write than the client reads
        if self.answer is None:
            return True
        offset = position(self.cycle.transport, self.answer)
        return offset is not None and self.correct(comments=[*self.answer.comments, offset])

    def correct(self, **fields: Any) -> bool:
        """Change what the keeper knows of the answer, if that is possible at once. Returns whether it was."""
        if self.answer is not None:
            answer = replace(self.answer, **fields)
            if not self.channel.send_now(KeeperMessage(keep=answer)):
                return False
            self.answer = answer
        return True

    async def probe(self) -> None:
        """Find out whether a client that has closed its side still reads: it skips an interim response before
        the answer, and the kernel of a client that has gone refuses it.
        """
        transport = self.cycle.transport
        if isinstance(transport, RestOfAnswer):
            transport = transport.untouched
        if transport is None or self.cycle.response_started or self.cycle.scope["http_version"] < "1.1":
            return
        if self.correct(base=self.answer.base + len(INTERIM) if self.answer else 0):
            transport.write(INTERIM)

    # --- end ------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Let another gateway go on, if the keeper has the socket."""
        if self.answer is not None and not self.is_handed_over:
            self.is_handed_over = True
            self.cycle.transport.abort()  # closes our handle only: the connection lives on in the keeper's
            asyncio.get_running_loop().call_soon(self.is_closed.set)  # comes after the end of the transport

    async def cut(self) -> None:
        """Cut the connection: nothing may follow what is written of the answer."""
        self.cycle.disconnected = True
        self.cycle.transport.abort()
        await self.drop()

    async def finish(self) -> None:
        """End the answer here: all is written, the client has gone, or the answer was handed over. Then tell
        the keeper.
        """
        try:
            if self.ends and not self.is_handed_over:
                await flush(self.cycle)
        finally:
            while self.ends:
                self.ends.pop()()
        if self.answer is None or not self.is_told:
            return
        self.channel.handovers.discard(self.hand_over)
        if not self.is_handed_over:
            name, requests = self.answer.name, self.answer.requests
            goes_on = self.cycle.disconnected and requests is not None and requests.is_kept
            await self.channel.tell(KeeperMessage(left=name) if goes_on else KeeperMessage(drop=name))
            return
        await self.is_closed.wait()
        await self.channel.tell(KeeperMessage(release=self.answer.name))


async def flush(cycle: Any) -> None:
    """Wait until the kernel has every byte that was written, or the connection is lost."""
    transport = cycle.transport
    if not cycle.disconnected and transport.get_write_buffer_size():
        low, high = transport.get_write_buffer_limits()
        transport.set_write_buffer_limits(high=0)
        await cycle.flow.drain()
        if not transport.is_closing():
            transport.set_write_buffer_limits(high=high, low=low)


def position(transport: Any, answer: KeptAnswer) -> int | None:
    """The offset in the answer up to which it was written, to the kernel or to the transport's buffer; None
    if it is not known.
    """
    if isinstance(transport, RestOfAnswer):
        transport.insert_comments()
        return None if transport.is_behind else transport.position
    try:
        written = bytes_written(transport.get_extra_info("socket"))
    except OSError:
        return None
    buffered: int = transport.get_write_buffer_size()
    return written + buffered - answer.base


def socket_of(scope: Scope) -> AnswerSocket:
    """The socket of a request's answer."""
    found: AnswerSocket = scope["state"][ANSWER_SOCKET]
    return found


async def give_answer_socket(
    channel: KeeperChannel, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Middleware: give each HTTP request its AnswerSocket; a route may have the socket kept."""
    state = scope["state"]
    answer_socket = AnswerSocket(channel, scope["extensions"][CYCLE], state.get(INHERITED))
    state[ANSWER_SOCKET] = answer_socket

    async def send_start(message: Message) -> None:
        if message["type"] == "http.response.start":
            await answer_socket.start(message, send)
        else:
            await send(message)

    try:
        await app(scope, receive, send_start)
    finally:
        await answer_socket.finish()
