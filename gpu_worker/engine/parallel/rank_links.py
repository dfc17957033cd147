"""Rank links: the connections by which the ranks of a worker learn that another one is lost, and compare what
must be the same. No torch.

Every rank above 0 has one to rank 0. A rank that ends closes it; the kernel closes it when a machine or the
network between two machines is gone. Messages are lines of JSON.
"""

import json
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROBE_S = 1
"""Time between two probes of an idle connection, by the kernel."""
RECEIVE_BYTES = 2**16
MAX_LINE_BYTES = 2**20
LOOPBACKS = "127."

END = {"end": True}
"""Rank 0's last message to ranks of a worker that ends in order."""

OnLoss = Callable[["RankLost"], None]


@dataclass(frozen=True, slots=True)
class Member:
    """A rank, and the machine on which it runs."""

    rank: int
    host: str
    address: str

    def __str__(self) -> str:
        is_here = self.address.startswith(LOOPBACKS)
        return f"rank {self.rank}{'' if is_here else f' on {self.host} ({self.address})'}"


class RankLost(Exception):
    """A rank has ended, or does not answer.

    Attributes:
        is_end: whether rank 0 has said that the worker ends.
    """

    def __init__(self, member: Member, cause: str, is_end: bool = False) -> None:
        super().__init__(f"{member} {cause}")
        self.is_end = is_end


class LineSocket:
    """A connection that sends and receives messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Any) -> None:
        """Raises OSError."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any]:
        """Wait for bytes → the messages that are complete. Raises OSError, ValueError for what is no message,
        EOFError once it is closed.
        """
        data = self.connection.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        *lines, self.received = (self.received + data).split(b"\n")
        if len(self.received) > MAX_LINE_BYTES:
            raise ValueError("a message without an end")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


class RankLinks:
    """This rank's links. A thread reads them; the first rank that is lost ends the worker.

    Attributes:
        members: all ranks, in order.
        peers: the links by rank; of a rank above 0 the one to rank 0.
        address, store_port: where torch's store of rank 0 listens, as this rank reaches it.
        listener: of rank 0: the listening socket for that store.
        lost: the first rank that was lost.
        on_loss: called by the thread with it.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        peers: Mapping[int, LineSocket],
        address: str,
        store_port: int,
        listener: socket.socket | None = None,
    ) -> None:
        self.rank = rank
        self.members = members
        self.peers = peers
        self.address = address
        self.store_port = store_port
        self.listener = listener
        self.lost: RankLost | None = None
        self.is_over = threading.Event()
        self.on_loss: OnLoss | None = None
        self.messages: dict[int, queue.SimpleQueue[Any]] = {peer: queue.SimpleQueue() for peer in peers}
        threading.Thread(target=self.read, daemon=True, name="rank links").start()

    def exchange(self, message: Any) -> list[Any]:
        """Give all ranks this rank's message → the messages of all, by rank. All ranks call it. Raises
        RankLost.
        """
        if self.rank:
            self.send(0, message)
            messages: list[Any] = self.receive(0)
            return messages
        messages = [message, *(self.receive(peer) for peer in sorted(self.peers))]
        for peer in self.peers:
            self.send(peer, messages)
        return messages

    def send(self, peer: int, message: Any) -> None:
        try:
            self.peers[peer].send(message)
        except OSError as error:
            raise RankLost(self.members[peer], f"is lost: {error.strerror}") from error

    def receive(self, peer: int) -> Any:
        """Wait for the next message of a rank. Raises RankLost if any rank is lost before."""
        message = self.messages[peer].get()
        if isinstance(message, RankLost):
            raise message
        return message

    def say_end(self) -> None:
        """Tell the other ranks that the worker ends in order."""
        for peer in self.peers:
            try:
                self.peers[peer].send(END)
            except OSError:
                continue  # it has ended before

    def watch(self, on_loss: OnLoss) -> None:
        """Call `on_loss` in the thread of the links when a rank is lost, or at once if one is."""
        self.on_loss = on_loss
        if self.lost:
            on_loss(self.lost)

    def wait_for_loss(self, timeout_s: float) -> RankLost | None:
        """The first rank that was lost, within this time: another error may be its consequence."""
        self.is_over.wait(timeout_s)
        return self.lost

    def read(self) -> None:
        """Read all links until a rank is lost."""
        ranks = {link.fileno(): peer for peer, link in self.peers.items()}
        while not self.lost:
            for handle in select.select([*ranks], [], [])[0]:
                self.lost = self.lost or self.read_from(ranks[handle])
        self.tell_loss(self.lost)

    def read_from(self, peer: int) -> RankLost | None:
        """Take the messages that a link brings → the loss if it has none any more."""
        member = self.members[peer]
        try:
            for message in self.peers[peer].receive():
                if message == END:
                    return RankLost(member, "ends the worker", is_end=True)
                self.messages[peer].put(message)
        except EOFError:
            return RankLost(member, "is lost: it has ended")
        except (OSError, ValueError) as error:
            return RankLost(member, f"is lost: {error.strerror if isinstance(error, OSError) else error}")
        return None

    def tell_loss(self, lost: RankLost) -> None:
        self.is_over.set()
        for messages in self.messages.values():
            messages.put(lost)
        if self.on_loss:
            self.on_loss(lost)


def probe(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel close the connection if the other machine does not answer for this time, idle or
    not.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": max(1, int(timeout_s))}
    if sys.platform == "linux":
        options["TCP_USER_TIMEOUT"] = int(timeout_s * 1000)
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
