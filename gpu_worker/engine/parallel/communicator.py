"""Communicator: what the ranks of a worker send each other. Tensors go by gloo on CPU and by NCCL on CUDA,
commands and samples by queues in torch's store, which rank 0 has.
"""

import os
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
from gpu_worker.protocol import Command, FrameDecoder, encode

CONNECT_TIMEOUT = timedelta(seconds=60)
FOREVER = timedelta(days=365)
"""No time-out: ranks without work wait for rank 0, and the agent watches how long a step takes."""
COMMANDS, SAMPLES = "commands", "samples"
"""Queues: each rank has its own of each name."""
PIECE_BYTES = 2**22
"""Of an entry in a queue: torch's store takes 8 MiB, and plans have the bytes of pictures."""


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
        queues: None where this rank is alone.
        unfinished: what was sent of late, with the tensors that must stay until it is over.
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
        self.queues: Any = None
        self.unfinished: deque[tuple[Any, torch.Tensor]] = deque()
        if self.world_size > 1:
            self.links = links or connect_ranks(info)
            self.queues = join_process_group(self.links)
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
        return self.rank == self.world_size - self.tp_size

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
        """Send hidden states [1, tokens, hidden] to the same place in the next stage. A step is read by all
        before as many others are launched as there are stages: those before must have arrived.
        """
        states = states.contiguous()
        self.unfinished.append((dist.isend(states, self.rank + self.tp_size), states))
        while len(self.unfinished) > self.num_stages + 2:
            self.unfinished.popleft()[0].wait()

    def expect_states(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], torch.Tensor]:
        """Expect hidden states [*shape] of the stage before this one → what waits for them. On CUDA only the
        device waits.
        """
        states = torch.empty(*shape, dtype=dtype, device=device)
        work: Any = dist.irecv(states, self.rank - self.tp_size)

        def wait() -> torch.Tensor:
            work.wait()
            return states

        return wait

    def send_to_all(self, data: bytes, queue: str) -> None:
        """Send bytes to all other ranks, in pieces; the first byte of each says whether more follow."""
        begins = range(0, len(data) or 1, PIECE_BYTES)
        pieces = [bytes([begin != begins[-1]]) + data[begin : begin + PIECE_BYTES] for begin in begins]
        for rank in range(self.world_size):
            for piece in pieces if rank != self.rank else ():
                self.queues.queue_push(f"{queue}{rank}", piece)

    def receive(self, queue: str) -> bytes:
        """Wait for the next bytes that another rank sends."""
        data = bytearray()
        while True:
            piece = self.queues.queue_pop(f"{queue}{self.rank}")
            data += piece[1:]
            if not piece[0]:
                return bytes(data)

    # Commands: what rank 0 obeys before a step, all others obey before theirs.

    def broadcast_commands(self, commands: Iterable[Command]) -> list[Command]:
        """Rank 0's part. Returns the commands."""
        commands = list(commands)
        if self.world_size > 1:
            self.send_to_all(b"".join(map(encode, commands)), COMMANDS)
        return commands

    def receive_commands(self) -> Iterator[Command]:
        """The other ranks' part; waits for rank 0."""
        frames = FrameDecoder()
        frames.feed(self.receive(COMMANDS))
        for frame in frames:
            assert isinstance(frame, Command)
            yield frame


def join_process_group(links: RankLinks) -> Any:
    """Connect the ranks by torch → a connection to its store for queues. Raises RendezvousFailed."""
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
    queues = store.clone()  # type: ignore[attr-defined]
    queues.set_timeout(FOREVER)
    return queues


def name_interface(address: str) -> None:
    """Have gloo and NCCL use the network by which the ranks are connected, unless the user names another. By
    themselves they take what the machine's own name means, often loopback.
    """
    for name, known in psutil.net_if_addrs().items():
        if address in [one.address for one in known]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


SINGLE_RANK = Communicator(RankInfo())
