"""Communicator: what the ranks of a worker send each other. Tensors go by gloo on CPU and by NCCL on CUDA,
grants by gloo.
"""

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu_worker.protocol import FrameDecoder, Grant, PeerClosed, encode
from gpu_worker.rank import LOOPBACK, RankInfo

FOREVER = timedelta(days=365)
"""No time-out: ranks without work wait for rank 0, and the agent watches how long a step takes."""


class Communicator:
    """One rank's end. Rank 0 receives the grants and samples; the other ranks apply and launch the same, step
    by step. Tensors have any shape [...] and dtype, the same on all ranks unless a method says otherwise.

    Rank 0 samples for all. If each rank sampled for itself, all would choose the same token only if they
    computed the same bits, and ranks may run on processors of different kinds.
    """

    def __init__(self, info: RankInfo) -> None:
        """Return when all ranks are connected."""
        self.info = info
        self.rank = info.rank
        self.world_size = info.world_size
        if self.world_size > 1:
            if info.address == LOOPBACK:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            ours = info.address == LOOPBACK and "TORCHELASTIC_RUN_ID" not in os.environ
            dist.init_process_group(
                backend,
                init_method=None if ours else f"tcp://{info.address}:{info.port}",
                store=local_store(info) if ours else None,
                rank=self.rank,
                world_size=self.world_size,
                timeout=FOREVER,
            )

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
        """The other ranks' part; waits for rank 0. Raises PeerClosed when rank 0 is gone."""
        try:
            [size] = self.broadcast_ints([0])
        except RuntimeError as error:
            raise PeerClosed from error
        buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(buffer, 0)
        frames = FrameDecoder()
        frames.feed(buffer.numpy().tobytes())
        for frame in frames:
            assert isinstance(frame, Grant)
            yield frame


def local_store(info: RankInfo) -> Any:
    """The store at which the ranks of one machine find each other. By itself torch would listen on all of the
    machine's addresses.
    """
    leads = info.rank == 0
    listener = socket.create_server((LOOPBACK, info.port)).detach() if leads else None
    return dist.TCPStore(LOOPBACK, info.port, info.world_size, leads, FOREVER, master_listen_fd=listener)  # type: ignore[attr-defined]


SINGLE_RANK = Communicator(RankInfo())
