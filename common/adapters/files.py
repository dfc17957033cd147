"""Adapter files: where a LoRA adapter is, and what can be said of it without torch.

An adapter is a folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.
"""

import hashlib
import json
import re
import time
from pathlib import Path

from common import model_files
from common.adapters.config import CONFIG_FILE, AdapterConfig, AdapterFault, read_adapter_config
from common.ids import HUB_ID
from common.messages.adapters import PoolAdapter
from common.settings.lora import AdapterSource
from common.settings.settings import SettingError, Settings

CONFIG, WEIGHTS = FILES = (CONFIG_FILE, "adapter_model.safetensors")
OLDER_WEIGHTS = "adapter_model.bin"
MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""
FACTOR = re.compile(r"\.lora_(A|embedding_A)\b")


def find_folder(path: str) -> Path:
    """Return the folder of an adapter, after downloading it if need be. Raises AdapterFault.

    Args:
        path: a folder, or a hub id, perhaps with `@revision`.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    hub_id, _, revision = path.partition("@")
    if not HUB_ID.fullmatch(hub_id):
        raise AdapterFault(f"there is no folder {path}")
    try:
        return model_files.download(hub_id, revision or None, model_files.no_progress, [*FILES])
    except SettingError as error:
        raise AdapterFault(error.cause) from error


def describe_adapter(source: AdapterSource, folder: Path) -> PoolAdapter:
    """Return the record of the adapter in a folder. Raises AdapterFault if it cannot be served."""
    config = read_config(folder)
    shapes = read_shapes(folder / WEIGHTS)
    ranks = [shape[0] for name, shape in shapes.items() if shape and FACTOR.search(name)]
    if not ranks:
        raise AdapterFault(f"{folder / WEIGHTS} has no matrices of a LoRA adapter")
    return PoolAdapter(
        source.name,
        str(folder) if Path(source.path).expanduser().is_dir() else source.path,
        digest_of(folder),
        rank=max(ranks),
        base_model=config.base_model,
        added_ms=int(1000 * time.time()),
    )


def read_config(folder: Path) -> AdapterConfig:
    """Return the config of an adapter that has weights, too. Raises AdapterFault if it cannot be served."""
    config = read_adapter_config(folder)
    if not (folder / WEIGHTS).is_file():
        has_older = (folder / OLDER_WEIGHTS).is_file()
        older = f"; {OLDER_WEIGHTS} is not read: save it with safetensors" if has_older else ""
        raise AdapterFault(f"{folder} has no {WEIGHTS}{older}")
    return config


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors of a file of safetensors, by name. Raises AdapterFault."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        head = file.read(size) if size <= MAX_HEADER_BYTES else b""
    try:
        header = json.loads(head)
        tensors = {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
        return {name: [int(size) for size in shape] for name, shape in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise AdapterFault(f"{path} is no file of safetensors, or damaged") from None


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of an adapter's files, in hexadecimal digits. Raises OSError."""
    whole = hashlib.sha256()
    for name in FILES:
        with (folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def find_adapter(source: AdapterSource) -> PoolAdapter:
    """Return the record of an adapter that a person names. Raises AdapterFault."""
    try:
        return describe_adapter(source, find_folder(source.path))
    except OSError as error:
        raise AdapterFault(f"{source.path} cannot be read: {error.strerror or error}") from error


def find_own_folder(adapter: PoolAdapter) -> Path:
    """Return the folder of an adapter of the registry on this machine. Raises AdapterFault if it has other
    files.
    """
    try:
        folder = find_folder(adapter.path)
        read_config(folder)
        if digest_of(folder) != adapter.digest:
            raise AdapterFault(f"{folder} has other files than when it was loaded: load it again")
    except OSError as error:
        raise AdapterFault(f"{adapter.path} cannot be read: {error.strerror or error}") from error
    return folder


def adapters_of(settings: Settings) -> list[PoolAdapter]:
    """Return the records of the adapters of LORA_ADAPTERS. Raises SettingError."""
    found = []
    for source in settings.adapters:
        try:
            found.append(find_adapter(source))
        except AdapterFault as fault:
            raise SettingError("lora_adapters", f"{source.name}: {fault}") from fault
    return found
