"""Rendezvous: all ranks of a worker connect to rank 0 before the model is loaded, or end with a line that
names those who did not. By these links they learn that another rank is lost. No torch.

Every rank above 0 has one link to rank 0. A rank that ends closes it; the kernel closes it when a machine or
the network between two machines is gone. Messages are lines of JSON.
"""

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from common.rank import LOOPBACK, RankInfo
from common.settings.settings import SettingError
from gpu_worker.protocol import first_cause

PROBE_S = 1
"""Time between two probes of an idle connection, by the kernel."""
MAX_LINE_BYTES = 2**20
LOOPBACKS = "127."

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


def say(link: socket.socket, message: Any) -> None:
    """Raises OSError."""
    link.sendall(json.dumps(message).encode() + b"\n")


def hear(link: socket.socket, timeout_s: float) -> Any:
    """Wait for a message, for at most this time between its bytes. Raises OSError, ValueError for what is no
    message, EOFError if it does not end.
    """
    link.settimeout(timeout_s)
    with link.makefile("rb", buffering=0) as file:  # what comes after it stays in the socket
        line = file.readline(MAX_LINE_BYTES)
    link.settimeout(None)
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)


@dataclass(eq=False)
class RankLinks:
    """This rank's links. A thread watches them; the first rank that is lost ends the worker. A message that
    comes over one says that rank 0 ends the worker in order.

    Attributes:
        members: all ranks, in order.
        peers: the links by rank; of a rank above 0 the one to rank 0.
        address, store_port: where torch's store of rank 0 listens, as this rank reaches it.
        listener: of rank 0: the listening socket for that store.
        lost: the first rank that was lost.
        on_loss: called by the thread with it.
    """

    rank: int
    members: Sequence[Member]
    peers: Mapping[int, socket.socket]
    address: str
    store_port: int
    listener: socket.socket | None = None
    lost: RankLost | None = None
    is_over: threading.Event = field(default_factory=threading.Event)
    on_loss: OnLoss | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self.wait, daemon=True, name="rank links").start()

    def say_end(self) -> None:
        """Tell the other ranks that the worker ends in order."""
        tell_all(self.peers.values(), "end")

    def watch(self, on_loss: OnLoss) -> None:
        """Call `on_loss` in the thread of the links when a rank is lost, or at once if one is."""
        self.on_loss = on_loss
        if self.lost:
            on_loss(self.lost)

    def wait_for_loss(self, timeout_s: float) -> RankLost | None:
        """The first rank that was lost, within this time: another error may be its consequence."""
        self.is_over.wait(timeout_s)
        return self.lost

    def wait(self) -> None:
        """Wait until a rank is lost."""
        ranks = {link: peer for peer, link in self.peers.items()}
        link = select.select([*ranks], [], [])[0][0]
        self.lost = lost = RankLost(self.members[ranks[link]], *why_lost(link))
        self.is_over.set()
        if self.on_loss:
            self.on_loss(lost)


def why_lost(link: socket.socket) -> tuple[str, bool]:
    """Why a link can be read: a cause, and whether rank 0 ends the worker."""
    try:
        is_end = bool(link.recv(1))
    except OSError as error:
        return f"is lost: {error.strerror}", False
    return ("ends the worker" if is_end else "is lost: it has ended"), is_end


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
"""How long a rank waits for all others to connect; then it ends with a line that names them."""
PEER_TIMEOUT_S = 5.0
RETRY_S = 0.2
CONNECT_TIMEOUT_S = 2.0
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun: its own store listens at MASTER_PORT, and rank 0 at the next one."""
MAPPED = "::ffff:"
"""Before an IPv4 address at a socket of IPv6."""


class RendezvousFailed(Exception):
    """Not all ranks are connected. `str()` is the one line that names those who are missing."""


def connect_ranks(
    info: RankInfo,
    timeout_s: float = TIMEOUT_S,
    peer_timeout_s: float = PEER_TIMEOUT_S,
    num_stages: int = 1,
) -> RankLinks:
    """Return when all ranks are connected. Raises RendezvousFailed, SettingError.

    Args:
        peer_timeout_s: how long a machine may give no sign of life.
        num_stages: of the pipeline in which this rank takes part.
    """
    links = (join if info.rank else gather)(info, timeout_s, num_stages)
    for link in links.peers.values():
        probe(link, peer_timeout_s)
    return links


def gather(info: RankInfo, timeout_s: float, num_stages: int) -> RankLinks:
    """Rank 0's part: return when all are connected. Raises RendezvousFailed, SettingError."""
    end_s, joined = time.monotonic() + timeout_s, dict[int, tuple[socket.socket, Member]]()
    with listen(info, port_of(info)) as listener:
        while missing := [rank for rank in range(1, info.world_size) if not is_there(joined, rank)]:
            if not select.select([listener], [], [], max(0.0, end_s - time.monotonic()))[0]:
                connected = [member for rank, (_, member) in joined.items() if rank not in missing]
                failure = f"{describe_missing(info, missing, connected)} within {timeout_s:g} s"
                tell_all((link for link, _ in joined.values()), {"failed": failure})
                raise RendezvousFailed(failure)
            take(info, num_stages, joined, listener.accept()[0])
    return welcome(info, joined)


def is_there(joined: Mapping[int, tuple[socket.socket, Member]], rank: int) -> bool:
    """Whether a rank has joined, and has not ended since: until all are there it says nothing more."""
    return rank in joined and not select.select([joined[rank][0]], [], [], 0)[0]


def take(
    info: RankInfo, num_stages: int, joined: dict[int, tuple[socket.socket, Member]], link: socket.socket
) -> None:
    """Take in a rank that has connected, or refuse it; forget what says nothing that a rank says."""
    with contextlib.suppress(EOFError, OSError, ValueError, TypeError, KeyError):
        hello = hear(link, CONNECT_TIMEOUT_S)
        rank, world_size = int(hello["rank"]), hello["world_size"]
        stages = hello.get("num_stages", num_stages)
        cause = first_cause(
            (world_size != info.world_size, f"{world_size} ranks, but {info.world_size} at rank 0"),
            (stages != num_stages, f"{stages}, but {num_stages} at rank 0"),
            (not 0 < rank < info.world_size, f"rank {rank} is none of {world_size}"),
            (is_there(joined, rank), f"rank {rank} is connected already"),
        )
        if not cause:
            joined[rank] = link, Member(rank, str(hello["host"]), peer_address(link))
            return
        say(link, {"refused": cause, "world_size": info.world_size, "num_stages": num_stages})
    link.close()


def tell_all(links: Iterable[socket.socket], message: Any) -> None:
    for link in links:
        with contextlib.suppress(OSError):  # it has ended: its link says so
            say(link, message)


def welcome(info: RankInfo, joined: Mapping[int, tuple[socket.socket, Member]]) -> RankLinks:
    """Tell all ranks who takes part, and where torch's store will listen."""
    links = {rank: link for rank, (link, _) in sorted(joined.items())}
    own = next(filter(None, map(outward_address, links.values())), LOOPBACK)
    members = [Member(0, socket.gethostname(), own)]
    for rank, link in links.items():
        member = joined[rank][1]
        members.append(member if outward_address(link) else replace(member, address=own))
    listener = listen(info, 0)
    store_port: int = listener.getsockname()[1]
    tell_all(links.values(), {"members": [astuple(member) for member in members], "store_port": store_port})
    return RankLinks(0, members, links, LOOPBACK, store_port, listener)


def join(info: RankInfo, timeout_s: float, num_stages: int) -> RankLinks:
    """The part of ranks above 0: return when all are connected. Raises RendezvousFailed, SettingError."""
    address, port = info.address, port_of(info)
    shape = {"world_size": info.world_size, "num_stages": num_stages}
    hello = {"rank": info.rank, "host": socket.gethostname(), **shape}
    cause = f"rank 0 has not answered at {address}:{port}"
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        with contextlib.suppress(OSError, EOFError):  # nobody listens there yet, or rank 0 has ended
            link = socket.create_connection((address, port), min(CONNECT_TIMEOUT_S, left_s))
            say(link, hello)
            cause = f"rank 0 waits for other ranks at {address}:{port}"
            answer = hear(link, left_s + PEER_TIMEOUT_S)  # rank 0 names those who are missing
            if "members" in answer:
                members = [Member(*member) for member in answer["members"]]
                return RankLinks(info.rank, members, {0: link}, address, answer["store_port"])
            link.close()
            if "failed" in answer:
                raise RendezvousFailed(answer["failed"])
            for setting, name in (("num_shard", "world_size"), ("pipeline_parallel_size", "num_stages")):
                if answer[name] != shape[name]:
                    raise SettingError(setting, answer["refused"])
            cause = f"rank 0 at {address} has refused this one: {answer['refused']}"
        time.sleep(RETRY_S)
    raise RendezvousFailed(f"{cause} within {timeout_s:g} s")


def describe_missing(info: RankInfo, missing: Sequence[int], connected: Iterable[Member]) -> str:
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


def peer_address(link: socket.socket) -> str:
    return str(link.getpeername()[0]).removeprefix(MAPPED)


def outward_address(link: socket.socket) -> str:
    """Our address as a rank on another machine sees it; empty if the rank is on this one."""
    own = str(link.getsockname()[0]).removeprefix(MAPPED)
    return "" if own == peer_address(link) or own.startswith(LOOPBACKS) else own
