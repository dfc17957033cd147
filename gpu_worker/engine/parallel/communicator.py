"""Communicator: what the ranks of a worker send each other. Tensors go by gloo on CPU and by NCCL on CUDA,
grants by gloo.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.rank import LOOPBACK, RankInfo
from gpu_worker.engine.parallel.rank_links import RankLinks
from gpu_worker.engine.parallel.rendezvous import RendezvousFailed, connect_ranks
from gpu_worker.protocol import FrameDecoder, Grant, encode

CONNECT_TIMEOUT = timedelta(seconds=60)
SIOCGIFADDR = 0x8915
FOREVER = timedelta(days=365)
"""No time-out: ranks without work wait for rank 0, and the agent watches how long a step takes."""


class Communicator:
    """One rank's end. Rank 0 receives the grants and samples; the other ranks apply and launch the same, step
    by step. Tensors have any shape [...] and dtype, the same on all ranks unless a method says otherwise.

    Rank 0 samples for all. If each rank sampled for itself, all would choose the same token only if they
    computed the same bits, and ranks may run on processors of different kinds.
    """

    def __init__(self, info: RankInfo, links: RankLinks | None = None) -> None:
        """Return when all ranks are connected. `links`: those of this rank, if it has them already. Raises
        RendezvousFailed, SettingError.
        """
        self.info = info
        self.rank = info.rank
        self.world_size = info.world_size
        self.links = links
        if self.world_size > 1:
            self.links = links or connect_ranks(info)
            join_process_group(self.links)

    def exchange(self, message: Any) -> list[Any]:
        """The messages of all ranks, which are JSON, by rank."""
        return self.links.exchange(message) if self.links else [message]

    # Tensors: the same on all ranks afterwards.

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' tensors next to each other in the last dimension, in which rank r's has `sizes[r]`
        entries.
        """
        padded = torch.nn.functional.pad(tensor, (0, max(sizes) - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """What rank 0 has, in place."""
        if self.world_size > 1 and tensor.numel():
            dist.broadcast(tensor, 0)

    def broadcast_ints(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's values; other ranks pass the same number of any values."""
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values)
        dist.broadcast(tensor, 0)
        received: list[int] = tensor.tolist()
        return received

    def all_reduce_min(self, value: int) -> int:
        return self.reduce_int(value, dist.ReduceOp.MIN)

    def all_reduce_sum(self, value: int) -> int:
        return self.reduce_int(value, dist.ReduceOp.SUM)

    def reduce_int(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        tensor = torch.tensor(value)
        if self.world_size > 1:
            dist.all_reduce(tensor, operation)
        return int(tensor)

    # Grants: what rank 0 applies before a step, all others apply before theirs.

    def broadcast_grants(self, grants: Iterable[Grant]) -> list[Grant]:
        """Rank 0's part. Returns the grants."""
        grants = list(grants)
        if self.world_size > 1:
            data = b"".join(map(encode, grants))
            if self.broadcast_ints([len(data)])[0]:
                dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
        return grants

    def receive_grants(self) -> Iterator[Grant]:
        """The other ranks' part; waits for rank 0."""
        [size] = self.broadcast_ints([0])
        buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(buffer, 0)
        frames = FrameDecoder()
        frames.feed(buffer.numpy().tobytes())
        for frame in frames:
            assert isinstance(frame, Grant)
            yield frame


def join_process_group(links: RankLinks) -> None:
    """Connect the ranks by torch. Raises RendezvousFailed."""
    own = links.members[links.rank]
    name_interface(own.address)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    size = len(links.members)
    listener = links.listener.detach() if links.listener else None
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            links.address, links.store_port, size, not links.rank, CONNECT_TIMEOUT, master_listen_fd=listener
        )
        dist.init_process_group(
            backend, store=store, rank=links.rank, world_size=size, timeout=CONNECT_TIMEOUT
        )
    except RuntimeError as error:
        network = os.environ.get("GLOO_SOCKET_IFNAME", "the network of its own name")
        raise RendezvousFailed(
            f"{own} cannot reach the other ranks by {network} (GLOO_SOCKET_IFNAME): {first_line(error)}"
        ) from error
    dist.distributed_c10d._set_pg_timeout(FOREVER)


def name_interface(address: str) -> None:
    """Have gloo and NCCL use the network by which the ranks are connected, unless the user names another. By
    themselves they take what the machine's own name means, often loopback.
    """
    if interface := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def interface_of(address: str) -> str:
    """The network interface with this IPv4 address; empty if it is not known."""
    if address == LOOPBACK and sys.platform == "darwin":
        return "lo0"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


SINGLE_RANK = Communicator(RankInfo())
