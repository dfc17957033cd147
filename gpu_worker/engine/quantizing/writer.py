"""CheckpointWriter: writes a checkpoint into a folder beside its place, and moves it there at the end."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common import model_files
from common.settings.settings import SettingError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Ends of names of files that have weights."""
INDEX = "model.safetensors.index.json"


class CheckpointWriter:
    """Writes files of tensors one by one.

    Attributes:
        folder: where the files are until `publish`.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        self.names: list[dict[str, torch.dtype]] = []
        self.sizes: dict[str, int] = {}
        self.total_bytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors [...] of any dtype as the next file."""
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(own, self.folder / part_name(len(self.names)), metadata={"format": "pt"})
        self.names.append({name: tensor.dtype for name, tensor in own.items()})
        self.total_bytes += sum(tensor.nbytes for tensor in own.values())

    def publish(self, source: Path, quantization: Mapping[str, Any]) -> None:
        """Write the config with `quantization` in it and the index, copy the other files of `source`, and
        move all to its place.
        """
        count, weight_map = len(self.names), dict[str, str]()
        for number, tensors in enumerate(self.names):
            final = f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self.folder / part_name(number)).rename(self.folder / final)
            weight_map |= dict.fromkeys(tensors, final)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2))
        for file in source.iterdir():
            if file.is_file() and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, self.folder / file.name)
        path = self.folder / "config.json"
        config = json.loads(path.read_text()) | {"quantization_config": dict(quantization)}
        path.write_text(json.dumps(config, indent=2))
        model_files.follow_umask(self.folder)
        self.folder.chmod(0o777 & ~current_umask())
        self.folder.rename(self.output)


def part_name(number: int) -> str:
    return f"part-{number}"


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def writing(output: Path) -> Iterator[CheckpointWriter]:
    """Yield a writer; without `publish` nothing is left. Raises SettingError where the folder cannot be
    written to.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        writer = CheckpointWriter(output)
    except OSError as error:
        raise cannot_write(output, error) from error
    try:
        yield writer
    except OSError as error:
        raise cannot_write(output, error) from error
    finally:
        shutil.rmtree(writer.folder, ignore_errors=True)


def cannot_write(output: Path, error: OSError) -> SettingError:
    return SettingError("output", f"{output} cannot be written: {error.strerror or error}")


def check_room(output: Path, num_bytes: int) -> None:
    """Raises SettingError unless the disk has room for so many bytes."""
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < num_bytes:
        free, need = free_bytes // 2**20, -(-num_bytes // 2**20)
        raise SettingError("output", f"{output} needs about {need} MiB, and {parent} has {free} MiB free")
