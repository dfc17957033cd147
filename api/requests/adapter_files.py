"""Adapter files: the records of adapters that a person names, or LORA_ADAPTERS, from their files."""

import json
import re
import time
from pathlib import Path

from common.adapters import WEIGHTS, AdapterFault, PoolAdapter, digest_of, find_folder, read_config
from common.settings.settings import SettingError, Settings
from common.settings.types import AdapterSource

MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

FACTOR = re.compile(r"\.lora_(A|embedding_A)\b")


def describe_adapter(source: AdapterSource, folder: Path) -> PoolAdapter:
    """Return the record of the adapter in a folder. Raises AdapterFault if it cannot be served."""
    config = read_config(folder)
    path = folder / WEIGHTS
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        head = file.read(size) if size <= MAX_HEADER_BYTES else b""
    try:
        tensors = {name: one["shape"] for name, one in json.loads(head).items() if name != "__metadata__"}
        shapes = {name: [int(size) for size in shape] for name, shape in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise AdapterFault(f"{path} is no file of safetensors, or damaged") from None
    ranks = [shape[0] for name, shape in shapes.items() if shape and FACTOR.search(name)]
    if not ranks:
        raise AdapterFault(f"{path} has no matrices of a LoRA adapter")
    return PoolAdapter(
        source.name,
        str(folder) if Path(source.path).expanduser().is_dir() else source.path,
        digest_of(folder),
        rank=max(ranks),
        base_model=config.base_model,
        added_ms=int(1000 * time.time()),
    )


def find_adapter(source: AdapterSource) -> PoolAdapter:
    """Return the record of an adapter that a person names. Raises AdapterFault."""
    try:
        return describe_adapter(source, find_folder(source.path))
    except OSError as error:
        raise AdapterFault(f"{source.path} cannot be read: {error.strerror or error}") from error


def adapters_of(settings: Settings) -> list[PoolAdapter]:
    """Return the records of the adapters of LORA_ADAPTERS. Raises SettingError."""
    found = []
    for source in settings.adapters:
        try:
            found.append(find_adapter(source))
        except AdapterFault as fault:
            raise SettingError("lora_adapters", f"{source.name}: {fault}") from fault
    return found
