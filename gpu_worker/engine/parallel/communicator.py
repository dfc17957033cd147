"""Communicator: what the ranks of a worker send each other. Tensors go by gloo on CPU and by NCCL on CUDA,
commands and samples by gloo.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from common.rank import RankInfo
from common.settings.settings import SettingError
from gpu_worker.engine.parallel.rendezvous import RankLinks, RendezvousFailed, connect_ranks
from gpu_worker.protocol import Command, FrameDecoder, encode, first_line

CONNECT_TIMEOUT = timedelta(seconds=60)
FOREVER = timedelta(days=365)
"""No time-out: ranks without work wait for rank 0, and the agent watches how long a step takes."""
COMMANDS, STATES, SAMPLES = 1, 2, 3
"""Tags of messages between two ranks: messages of one tag arrive in order."""
REST = 8
"""Added to the tag of bytes for what does not fit their first message: later ones may be expected before."""
LENGTH = struct.Struct("<q")
HEAD_BYTES = 2048
"""Size of the first message of bytes, which receivers expect before they know how many there are."""


class Communicator:
    """One rank's end. Rank 0 receives the commands; the other ranks obey them and launch the same, step by
    step. Tensors have any shape [...] and dtype, the same on all ranks unless a method says otherwise.

    The ranks of a stage are neighbours (tensor parallel). One rank samples for all, the first of the last
    stage. If each rank sampled for itself, all would choose the same token only if they computed the same
    bits, and ranks may run on processors of different kinds.

    Attributes:
        tp_rank, tp_size: among the ranks of this stage.
        stage, num_stages: of a pipeline.
        group: the ranks of this stage; None if these are all.
        commands: the next commands of rank 0, on other ranks, once some have come.
        unfinished: what was sent in the last rounds, with the tensors that must stay until it is over.
    """

    def __init__(self, info: RankInfo, links: RankLinks | None = None, num_stages: int = 1) -> None:
        """Return when all ranks are connected. `links`: those of this rank, if it has them already. Raises
        RendezvousFailed, SettingError.
        """
        if info.world_size % num_stages:
            raise SettingError(
                "pipeline_parallel_size", f"{num_stages} does not divide the {info.world_size} ranks"
            )
        self.info = info
        self.rank = info.rank
        self.world_size = info.world_size
        self.num_stages = num_stages
        self.tp_size = info.world_size // num_stages
        self.stage = info.rank // self.tp_size
        self.tp_rank = info.rank % self.tp_size
        self.links = links
        self.group: Any = None
        self.commands: Callable[[], bytes] | None = None
        self.unfinished: deque[list[tuple[Any, torch.Tensor]]] = deque([[]])
        if self.world_size > 1:
            self.links = links or connect_ranks(info, num_stages=num_stages)
            join_process_group(self.links)
        if self.num_stages > 1 and self.tp_size > 1:
            begins = range(0, self.world_size, self.tp_size)
            groups = [dist.new_group([*range(it, it + self.tp_size)], timeout=FOREVER) for it in begins]
            self.group = groups[self.stage]

    def exchange(self, message: Any) -> list[Any]:
        """The messages of all ranks, which may be any value, by rank."""
        messages = [message] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(messages, message)
        return messages

    @property
    def samples(self) -> bool:
        """Whether this rank samples for all."""
        return self.rank == self.sampler

    @property
    def sampler(self) -> int:
        """The rank that samples."""
        return self.world_size - self.tp_size

    # Tensors: the same on all ranks of a stage afterwards.

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of the stage, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The tensors of the stage's ranks next to each other in the last dimension, in which rank r's has
        `sizes[r]` entries.
        """
        padded = torch.nn.functional.pad(tensor, (0, max(sizes) - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """What the stage's first rank has, in place."""
        if self.tp_size > 1 and tensor.numel():
            dist.broadcast(tensor, self.rank - self.tp_rank, group=self.group)

    def share(self, sampled: torch.Tensor) -> None:
        """What the rank that samples has, in place. The stages of a pipeline do not wait for each other here:
        its other ranks get bytes, and only read them with the step.
        """
        if self.num_stages == 1:
            self.broadcast_tensor(sampled)

    # From rank to rank. A sender does not wait: its next step may run before the receiver is there.

    def send_states(self, states: torch.Tensor) -> None:
        """Send hidden states [1, tokens, hidden] to the same place in the next stage."""
        self.send(states.contiguous(), self.rank + self.tp_size, STATES)

    def expect_states(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], torch.Tensor]:
        """Expect hidden states [*shape] of the stage before this one → what waits for them. On CUDA only the
        device waits.
        """
        return self.expect(torch.empty(*shape, dtype=dtype, device=device), self.rank - self.tp_size, STATES)

    def expect(self, buffer: torch.Tensor, rank: int, tag: int) -> Callable[[], torch.Tensor]:
        """Take a tensor as soon as a rank sends it: what is expected in time is not asked for."""
        work: Any = dist.irecv(buffer, rank, tag=tag)

        def wait() -> torch.Tensor:
            work.wait()
            return buffer

        return wait

    def expect_bytes(self, rank: int, tag: int) -> Callable[[], bytes]:
        """Expect bytes that a rank sends to all → what waits for them."""
        arrived = self.expect(torch.empty(HEAD_BYTES, dtype=torch.uint8), rank, tag)

        def wait() -> bytes:
            head = arrived().numpy().tobytes()
            (size,) = LENGTH.unpack_from(head)
            end = LENGTH.size + size
            if end <= HEAD_BYTES:
                return head[LENGTH.size : end]
            rest = self.expect(torch.empty(end - HEAD_BYTES, dtype=torch.uint8), rank, tag + REST)
            return head[LENGTH.size :] + rest().numpy().tobytes()

        return wait

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        self.unfinished[-1].append((dist.isend(tensor, rank, tag=tag), tensor))

    def send_to_all(self, data: bytes, tag: int) -> None:
        """Send bytes to all other ranks: their number and the first of them, then the rest."""
        head = LENGTH.pack(len(data)) + data[: HEAD_BYTES - LENGTH.size]
        parts = {tag: head.ljust(HEAD_BYTES), tag + REST: data[HEAD_BYTES - LENGTH.size :]}
        tensors = {
            own_tag: torch.frombuffer(bytearray(part), dtype=torch.uint8)
            for own_tag, part in parts.items()
            if part
        }
        for rank in range(self.world_size):
            for own_tag, tensor in tensors.items() if rank != self.rank else ():
                self.send(tensor, rank, own_tag)

    def begin_round(self) -> None:
        """Forget what was sent so long ago that all ranks must have it: a step is read by all before as many
        others are launched as there are stages.
        """
        self.unfinished.append([])
        while len(self.unfinished) > self.num_stages + 2:
            for work, _ in self.unfinished.popleft():
                work.wait()

    # Commands: what rank 0 obeys before a step, all others obey before theirs.

    def broadcast_commands(self, commands: Iterable[Command]) -> list[Command]:
        """Rank 0's part. Returns the commands."""
        commands = list(commands)
        if self.world_size > 1:
            self.begin_round()
            self.send_to_all(b"".join(map(encode, commands)), COMMANDS)
        return commands

    def receive_commands(self) -> Iterator[Command]:
        """The other ranks' part; waits for rank 0."""
        self.begin_round()
        frames = FrameDecoder()
        frames.feed((self.commands or self.expect_bytes(0, COMMANDS))())
        self.commands = self.expect_bytes(0, COMMANDS)
        for frame in frames:
            assert isinstance(frame, Command)
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
    for name, known in psutil.net_if_addrs().items():
        if address in [one.address for one in known]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


SINGLE_RANK = Communicator(RankInfo())
