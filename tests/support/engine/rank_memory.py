"""`python -m tests.support.engine.rank_memory [MIB]`: what each rank on CPU reads of a checkpoint in several
files, and what it takes at its peak.

`python -m tests.support.engine.rank_memory FOLDER RANK WORLD_SIZE PORT` is one rank, a process of its own,
which says so in JSON.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from common import model_files
from common.process.launch import die_with_parent
from common.rank import free_port
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel import tensor_parallel
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from tests.support.engine import multi_rank_engine

MIB = 2**20
HIDDEN = 1024
FILES = 5
LAYER_NUMBERS = (
    HIDDEN * HIDDEN * (2 + 2 / 4 + 3 * 4)
)  # q and o, k and v with a quarter of the heads, an MLP of four times the width
SAMPLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Taken:
    """In bytes.

    Attributes:
        read: of the checkpoint's tensors.
        peak: of memory of its own while it loads, beyond what it had before; pages of files, which the system
            takes back, not counted.
        kept: the same, when it is loaded.
    """

    read: int
    peak: int
    kept: int


def write(folder: Path, num_bytes: int) -> int:
    """A random Llama of about this size in bfloat16, in several files with an index → its tensors' bytes."""
    layers = max(1, round(num_bytes / 2 / LAYER_NUMBERS))
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=layers,
        vocab_size=8192,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size=num_bytes // FILES)
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    assert len(model_files.weight_files(folder)) > 1
    return sum(parameter.nbytes for parameter in model.parameters())


def measure(folder: Path, world_size: int) -> list[Taken]:
    """Of each rank."""
    port, environ = free_port(), os.environ | {"PARENT_PID": str(os.getpid())}
    commands = [
        [
            sys.executable,
            "-m",
            "tests.support.engine.rank_memory",
            str(folder),
            *map(str, (rank, world_size, port)),
        ]
        for rank in range(world_size)
    ]
    ranks = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    return [Taken(**json.loads(rank.communicate()[0].splitlines()[-1])) for rank in ranks]


def load(folder: Path, communicator: Communicator) -> Taken:
    parts: list[Any] = []
    slices = tensor_parallel.rank_tensors

    def noted(*arguments: Any) -> Iterator[tuple[str, Any]]:
        for name, part in slices(*arguments):
            parts.append(part)
            yield name, part

    tensor_parallel.rank_tensors = noted  # type: ignore[assignment]
    before = own_bytes()
    with sampled() as samples:
        engine = Engine(
            Settings(
                model_id=str(folder), dtype="bfloat16", kv_cache_bytes=2**22, max_batch_prefill_tokens=64
            ),
            communicator=communicator,
        )
    assert engine.ready.world_size == communicator.world_size
    read = sum(map(num_bytes, parts)) if parts else whole(folder)
    return Taken(read, max(samples) - before, own_bytes() - before)


def num_bytes(part: Any) -> int:
    """Of a tensor of the checkpoint, or of a slice of it. All are bfloat16."""
    return 2 * math.prod(part.get_shape())  # type: ignore[no-any-return]


def whole(folder: Path) -> int:
    files: list[Any] = [safe_open(file, "pt") for file in model_files.weight_files(folder)]
    return sum(num_bytes(file.get_slice(name)) for file in files for name in file.keys())  # noqa: SIM118


@contextmanager
def sampled() -> Iterator[list[int]]:
    """Our own memory now and then, while something goes on."""
    samples, over = [own_bytes()], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            samples.append(own_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def be_rank(folder: Path, rank: int, world_size: int, port: int) -> None:
    die_with_parent()
    communicator = (
        Communicator(multi_rank_engine.rank_info(rank, world_size, port)) if world_size > 1 else SINGLE_RANK
    )
    print(json.dumps(asdict(load(folder, communicator))))


def main(size_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        print(
            f"{write(Path(name), size_bytes) // MIB} MiB in "
            f"{len(model_files.weight_files(Path(name)))} files, bfloat16"
        )
        for world_size in (1, 2):
            for rank, taken in enumerate(measure(Path(name), world_size)):
                figures = ", ".join(f"{what} {number // MIB} MiB" for what, number in asdict(taken).items())
                print(f"rank {rank} of {world_size}: {figures}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        be_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        main(int(sys.argv[1]) * MIB if len(sys.argv) > 1 else 1024 * MIB)
