"""Rendezvous: all ranks of a worker connect to rank 0 before the model is loaded, or end with a line that
names those who did not. No torch, unless torchrun's store is asked where rank 0 listens.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from datetime import timedelta
from typing import Any

from common.rank import LOOPBACK, RankInfo
from common.settings.settings import SettingError
from gpu_worker.engine.parallel.rank_links import LOOPBACKS, LineSocket, Member, RankLinks, probe

TIMEOUT_S = 300.0
PEER_TIMEOUT_S = 5.0
RETRY_S = 0.2
CONNECT_TIMEOUT_S = 5.0
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun: its own store listens at MASTER_PORT."""
PLACE = "tokenfleet/rank0"
"""In that store: address and port of rank 0."""
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
        with listen(self.info, 0 if uses_agent_store() else self.info.port) as listener:
            if uses_agent_store():
                tell_place(self.info, listener, self.deadline)
            while missing := self.missing():
                sources: list[socket.socket | LineSocket] = [listener, *self.strangers, *self.joined.values()]
                ready = select.select(sources, [], [], self.deadline.left_s)[0]
                if not ready:
                    raise self.deadline.failure(self.describe_absent(missing))
                for source in ready:
                    if isinstance(source, LineSocket):
                        self.hear(source)
                    else:
                        self.accept(source)
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

    def accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(CONNECT_TIMEOUT_S)
        self.strangers.append(LineSocket(connection))

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
        self.place = info.address, info.port
        self.cause = f"rank 0 has not answered at {info.address}:{info.port}"

    def join(self) -> RankLinks:
        """Return when all are connected. Raises RendezvousFailed, SettingError."""
        while self.deadline.left_s:
            try:
                if links := self.try_to_join():
                    return links
            except OSError:
                pass  # nobody listens there yet, or rank 0 has ended meanwhile
            time.sleep(RETRY_S)
        raise self.deadline.failure(self.cause)

    def try_to_join(self) -> RankLinks | None:
        """Connect, and wait for the others; None if rank 0 has not taken this rank in, or ends.

        Raises OSError, RendezvousFailed, SettingError.
        """
        if uses_agent_store():
            self.place = ask_for_place(self.info, self.deadline)
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


# Torchrun's own store listens at MASTER_PORT: rank 0 listens at another port, and tells it there.


def uses_agent_store() -> bool:
    return os.environ.get(AGENT_STORE) == "True"


def agent_store(info: RankInfo, deadline: Deadline) -> Any:
    """Raises RendezvousFailed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(info.address, info.port, None, False, timedelta(seconds=deadline.left_s + RETRY_S))
    except RuntimeError as error:
        raise deadline.failure(f"torchrun's store has not answered at {info.address}:{info.port}") from error


def tell_place(info: RankInfo, listener: socket.socket, deadline: Deadline) -> None:
    """Tell where rank 0 listens. Raises RendezvousFailed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((info.address, info.port))
        own = route.getsockname()[0]
    address = info.address if own.startswith(LOOPBACKS) else own
    agent_store(info, deadline).set(PLACE, f"{address} {listener.getsockname()[1]}")


def ask_for_place(info: RankInfo, deadline: Deadline) -> tuple[str, int]:
    """Where rank 0 listens. An earlier rank 0 may have told it: then nobody listens there. Raises
    RendezvousFailed.
    """
    try:
        address, port = agent_store(info, deadline).get(PLACE).decode().split()
    except RuntimeError as error:
        raise deadline.failure("rank 0 has not told torchrun's store where it listens") from error
    return address, int(port)
