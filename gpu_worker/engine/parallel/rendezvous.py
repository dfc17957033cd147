"""Rendezvous: all ranks of a worker connect to rank 0 before the model is loaded, or end with a line that
names those who did not. By these links they compare what must be the same, and learn that another rank is
lost. No torch.

Every rank above 0 has one link to rank 0. A rank that ends closes it; the kernel closes it when a machine or
the network between two machines is gone. Messages are lines of JSON.
"""

import contextlib
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from common.rank import LOOPBACK, RankInfo
from common.settings.settings import SettingError

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
        for peer in self.peers.values():
            with contextlib.suppress(OSError):  # it has ended before
                peer.send(END)

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
        self.is_over.set()
        for messages in self.messages.values():
            messages.put(self.lost)
        if self.on_loss:
            self.on_loss(self.lost)

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


TIMEOUT_S = 300.0
PEER_TIMEOUT_S = 5.0
RETRY_S = 0.2
CONNECT_TIMEOUT_S = 5.0
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun: its own store listens at MASTER_PORT, and rank 0 at the next one."""
MAPPED = "::ffff:"
"""Before an IPv4 address at a socket of IPv6."""


class RendezvousFailed(Exception):
    """Not all ranks are connected. `str()` is the one line that names those who are missing."""


class Deadline:
    """The time at which a rank gives up."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.at_s - time.monotonic())

    def failure(self, cause: str) -> RendezvousFailed:
        return RendezvousFailed(f"{cause} within {self.timeout_s:g} s")


def connect_ranks(
    info: RankInfo, timeout_s: float = TIMEOUT_S, peer_timeout_s: float = PEER_TIMEOUT_S
) -> RankLinks:
    """Return when all ranks are connected. `peer_timeout_s`: how long a machine may give no sign of life.

    Raises RendezvousFailed, SettingError.
    """
    deadline = Deadline(timeout_s)
    links = Follower(info, deadline).join() if info.rank else Leader(info, deadline).gather()
    for peer in links.peers.values():
        probe(peer.connection, peer_timeout_s)
    return links


class Leader:
    """Rank 0 while it waits for the others.

    Attributes:
        joined: the links of the other ranks that are connected.
        members: who they are.
        strangers: connections that have not said who they are.
    """

    def __init__(self, info: RankInfo, deadline: Deadline) -> None:
        self.info = info
        self.deadline = deadline
        self.joined: dict[int, LineSocket] = {}
        self.members: dict[int, Member] = {}
        self.strangers: list[LineSocket] = []

    def gather(self) -> RankLinks:
        """Return when all are connected. Raises RendezvousFailed, SettingError."""
        with listen(self.info, port_of(self.info)) as listener:
            while missing := self.missing():
                sources: list[socket.socket | LineSocket] = [listener, *self.strangers, *self.joined.values()]
                ready = select.select(sources, [], [], self.deadline.left_s)[0]
                if not ready:
                    raise self.deadline.failure(self.describe_absent(missing))
                for source in ready:
                    if isinstance(source, LineSocket):
                        self.hear(source)
                        continue
                    connection, _ = source.accept()
                    connection.settimeout(CONNECT_TIMEOUT_S)
                    self.strangers.append(LineSocket(connection))
        return self.welcome()

    def describe_absent(self, missing: Sequence[int]) -> str:
        """Name the ranks that never came; where there is none, those that have left. A rank may leave at the
        end of its own time, just before this one's.
        """
        absent = [rank for rank in missing if rank not in self.members] or missing
        connected = [member for rank, member in self.members.items() if rank not in absent]
        return describe_missing(self.info, absent, connected)

    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.info.world_size) if rank not in self.joined]

    def hear(self, link: LineSocket) -> None:
        """Read what a connection says. Forget it if it has ended, or says nothing that a rank says."""
        try:
            for hello in link.receive():
                self.take(link, int(hello["rank"]), hello["world_size"], str(hello["host"]))
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            self.forget(link)

    def take(self, link: LineSocket, rank: int, world_size: int, host: str) -> None:
        """Take a rank in, or refuse it."""
        if cause := self.refusal(rank, world_size):
            link.send({"refused": cause, "world_size": self.info.world_size})
            self.forget(link)
            return
        self.strangers.remove(link)
        self.joined[rank] = link
        self.members[rank] = Member(rank, host, peer_address(link))
        for other in self.joined.values():
            with contextlib.suppress(OSError):  # it has ended, which is read next
                other.send({"missing": self.missing()})

    def refusal(self, rank: int, world_size: int) -> str:
        """Why a rank cannot be taken in; empty if it can."""
        if world_size != self.info.world_size:
            return f"{world_size} ranks, but {self.info.world_size} at rank 0"
        if rank in self.joined:
            return f"{self.members[rank]} is connected already"
        return "" if 0 < rank < world_size else f"rank {rank} is none of {world_size}"

    def forget(self, link: LineSocket) -> None:
        link.close()
        self.strangers = [other for other in self.strangers if other is not link]
        self.joined = {rank: other for rank, other in self.joined.items() if other is not link}

    def welcome(self) -> RankLinks:
        """Tell all ranks who takes part, and where torch's store will listen."""
        for stranger in self.strangers:
            stranger.close()
        own = next(filter(None, map(outward_address, self.joined.values())), LOOPBACK)
        members = [Member(0, socket.gethostname(), own)]
        for rank in range(1, self.info.world_size):
            is_here = outward_address(self.joined[rank]) == ""
            members.append(
                Member(rank, self.members[rank].host, own if is_here else self.members[rank].address)
            )
        listener = listen(self.info, 0)
        store_port: int = listener.getsockname()[1]
        for link in self.joined.values():
            link.connection.settimeout(None)
            with contextlib.suppress(OSError):  # it has ended: its link says so
                link.send({"members": [astuple(member) for member in members], "store_port": store_port})
        return RankLinks(0, members, self.joined, LOOPBACK, store_port, listener)


class Follower:
    """A rank above 0 while it waits for rank 0 and the others.

    Attributes:
        place: address and port where rank 0 listens.
        cause: why the last try has failed.
    """

    def __init__(self, info: RankInfo, deadline: Deadline) -> None:
        self.info = info
        self.deadline = deadline
        self.place = info.address, port_of(info)
        self.cause = f"rank 0 has not answered at {info.address}:{self.place[1]}"

    def join(self) -> RankLinks:
        """Return when all are connected. Raises RendezvousFailed, SettingError."""
        while self.deadline.left_s:
            with contextlib.suppress(OSError):  # nobody listens there yet, or rank 0 has ended meanwhile
                if links := self.try_to_join():
                    return links
            time.sleep(RETRY_S)
        raise self.deadline.failure(self.cause)

    def try_to_join(self) -> RankLinks | None:
        """Connect, and wait for the others; None if rank 0 has not taken this rank in, or ends.

        Raises OSError, RendezvousFailed, SettingError.
        """
        link = LineSocket(socket.create_connection(self.place, min(CONNECT_TIMEOUT_S, self.deadline.left_s)))
        hello = {"rank": self.info.rank, "world_size": self.info.world_size, "host": socket.gethostname()}
        link.send(hello)
        with contextlib.suppress(EOFError):
            while True:
                link.connection.settimeout(self.deadline.left_s or RETRY_S)
                for message in link.receive():
                    if links := self.hear(link, message):
                        link.connection.settimeout(None)
                        return links
        link.close()
        return None

    def hear(self, link: LineSocket, message: dict[str, Any]) -> RankLinks | None:
        """Take what rank 0 says. Raises SettingError."""
        if "members" in message:
            members = [Member(*member) for member in message["members"]]
            return RankLinks(self.info.rank, members, {0: link}, self.place[0], message["store_port"])
        if "missing" in message:
            self.cause = describe_missing(self.info, message["missing"])
        if "refused" in message:
            if message["world_size"] != self.info.world_size:
                raise SettingError("num_shard", message["refused"])
            self.cause = f"rank 0 at {self.place[0]} has refused this one: {message['refused']}"
        return None


def describe_missing(info: RankInfo, missing: Sequence[int], connected: Iterable[Member] = ()) -> str:
    words = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    others = "; ".join(map(str, connected))
    others = f" (connected: {others})" if others else ""
    have = "has" if len(missing) == 1 else "have"
    return f"{words} of {info.world_size} {have} not connected to {info.address}:{info.port}{others}"


def port_of(info: RankInfo) -> int:
    """The port at which rank 0 listens."""
    return info.port + (os.environ.get(AGENT_STORE) == "True")


def listen(info: RankInfo, port: int) -> socket.socket:
    """A listening socket: on loopback if all ranks are on this machine, else on all addresses, since a
    machine's own name may mean loopback to itself. Raises SettingError.
    """
    try:
        if info.is_local:
            return socket.create_server((LOOPBACK, port))
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise SettingError("master_port", f"{port} cannot be listened at: {error.strerror}") from error


def peer_address(link: LineSocket) -> str:
    return str(link.connection.getpeername()[0]).removeprefix(MAPPED)


def outward_address(link: LineSocket) -> str:
    """Our address as a rank on another machine sees it; empty if the rank is on this one."""
    own = str(link.connection.getsockname()[0]).removeprefix(MAPPED)
    return "" if own == peer_address(link) or own.startswith(LOOPBACKS) else own
