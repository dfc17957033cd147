"""Same model: whether the ranks of several machines, which find the model by themselves, have the same files
and the same settings.
"""

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from common.model_files import REQUIRED_FILES, weight_files
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.parallel.rendezvous import Member

PART_BYTES = 2**16
"""The first and last bytes of a weight file tell another one of the same shapes."""
EQUAL_SETTINGS = (
    "block_size",
    "kv_cache_dtype",
    "load_format",
    "max_batch_size",
    "max_batch_prefill_tokens",
    "prefix_caching",
    "quantize",
    "rope_factor",
    "rope_scaling",
    "speculate",
    "speculative_config",
)
"""Settings by which ranks compute the same steps."""


def describe_model(path: Path, settings: Settings, dtype: str, device: str) -> dict[str, dict[str, str]]:
    """What must be the same at all ranks: digests of files, and settings."""
    weights = [] if settings.makes_weights else weight_files(path)
    files = [*(path / name for name in REQUIRED_FILES), *weights]
    values = {name: str(getattr(settings, name)) for name in EQUAL_SETTINGS}
    return {
        "files": {file.name: digest(file) for file in files},
        "settings": {"version": version("tokenfleet"), "device": device, "dtype": dtype, **values},
    }


def digest(path: Path) -> str:
    """A digest of a file's size, its beginning and its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(PART_BYTES)
        file.seek(max(0, size - PART_BYTES))
        return hashlib.sha256(b"%d %b %b" % (size, head, file.read())).hexdigest()


def check_same(
    model_id: str, descriptions: Sequence[Mapping[str, Mapping[str, str]]], members: Sequence[Member]
) -> None:
    """Raises SettingError with the first difference to rank 0, and where it is."""
    first = descriptions[0]
    for description, member in zip(descriptions, members, strict=True):
        for name, value in description["settings"].items():
            if value != (expected := first["settings"].get(name)):
                raise SettingError(name, f"{value} at {member}, but {expected} at {members[0]}")
        if differing := {*first["files"].items()} ^ {*description["files"].items()}:
            name = min(name for name, _ in differing)
            raise SettingError("model_id", f"{name} of {model_id} at {member} is not that of {members[0]}")
