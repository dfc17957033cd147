"""LoRA adapters of a pool: their messages, their configs in PEFT's format, and their files, without torch.

An adapter is a folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`. Kinds that
are not served are refused by name.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, ValidationError, model_validator

from common import model_files
from common.ids import HUB_ID
from common.messages.codec import wire_field
from common.settings.fields import AdapterSource, first_error
from common.settings.settings import SettingError

SHOWN_DIGITS = 16
"""Digits of an adapter's digest in its key."""
LOADING, READY, LEAVING = "loading", "ready", "leaving"
"""States of an adapter: workers load it, requests may name it, or it goes once no live request has it."""


@dataclass(frozen=True, slots=True)
class PoolAdapter:
    """A LoRA adapter of a pool.

    Attributes:
        name: by which clients ask for it.
        path: its folder, or its hub id with `@` and the commit; each worker finds it there.
        digest: SHA-256 of its files, in hexadecimal digits: a worker that finds other files refuses it.
        state: LOADING, READY or LEAVING.
        rank: the largest of its matrices, by its configuration.
        base_model: that it was made for, by its configuration.
        added_ms: Unix time in ms; a record that is written anew has another one.
        failure: how an engine ended that loaded it; workers that do not have it yet refuse it.
        num_ends: engines that ended while they loaded it.
    """

    name: str = wire_field("n")
    path: str = wire_field("p")
    digest: str = wire_field("d")
    state: str = wire_field("s", default=LOADING)
    rank: int = wire_field("r", default=0)
    base_model: str = wire_field("b", default="")
    added_ms: int = wire_field("a", default=0)
    failure: str = wire_field("f", default="")
    num_ends: int = wire_field("e", default=0)

    @property
    def key(self) -> str:
        """What requests, block hashes and engines know it by; another one of its name has another key."""
        return f"{self.name}@{self.digest[:SHOWN_DIGITS]}"


def adapter_name(key: str) -> str:
    """Return the name of the adapter with this key; empty for none."""
    return key.rpartition("@")[0]


@dataclass(frozen=True, slots=True)
class HeldAdapters:
    """The adapters that a worker has loaded, in the field `adapters` of its heartbeat.

    Attributes:
        loaded: keys of adapters with which rows may start.
        refused: (key, `added_ms` of the record, cause) of those that it cannot serve.
    """

    loaded: list[str] = wire_field("l", default_factory=list)
    refused: list[tuple[str, int, str]] = wire_field("r", default_factory=list)

    def why_not(self, adapter: PoolAdapter) -> str:
        """Return why the worker cannot serve this adapter; empty if it can, or may yet."""
        wanted = (adapter.key, adapter.added_ms)
        return next((cause for key, added_ms, cause in self.refused if (key, added_ms) == wanted), "")


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The live requests with adapters, in the field `adapters` of the hash `state`.

    Attributes:
        requests: (name of an adapter, number of those that run, number of those that wait).
    """

    requests: list[tuple[str, int, int]] = wire_field("r", default_factory=list)


CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_CONFIG_BYTES = 2**20
MAX_PATTERNS = 4096
REFUSED = {
    "use_dora": "DoRA, which scales the columns of the merged weights",
    "use_qalora": "QA-LoRA, which pools a layer's inputs",
    "use_bdlora": "BD-LoRA, whose matrices are block-diagonal",
    "alora_invocation_tokens": "activated LoRA, which begins within a prompt",
    "arrow_config": "Arrow, which chooses among adapters for each token",
    "kasa_config": "KaSA, which changes the base model's weights",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters of parameters that belong to no layer of their own, such as experts",
    "trainable_token_indices": "embeddings of single tokens that were trained",
    "modules_to_save": "whole layers that were trained beside the adapter (modules_to_save)",
    "lora_bias": "biases of its own (lora_bias)",
}
"""Fields whose values, unless false or empty, mean what is not served → its name."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin a training that change the base model's weights, too."""
LAYER_NAME = r"\^?([\w-]|\\?\.)+\$?"
"""A pattern that is the name of a layer, or the end of one; a dot stands for itself. PEFT itself writes no
others.
"""


class AdapterFault(Exception):
    """An adapter that cannot be served. `str()` says why, and begins without a capital."""


class AdapterConfig(BaseModel):
    """What of PEFT's config says what an adapter computes.

    Attributes:
        r, rank_pattern: ranks; each layer's own is that of its matrices.
        alpha_pattern: names of layers, or their ends → their own alpha.
        use_rslora: rank-stabilised, alpha / sqrt(rank) (arXiv:2312.03732).
        base_model_name_or_path: that it was made for; empty if it does not say.
    """

    r: PositiveInt = 8
    lora_alpha: FiniteFloat = 8
    use_rslora: bool = False
    rank_pattern: Mapping[str, PositiveInt] = {}
    alpha_pattern: Annotated[
        Mapping[Annotated[str, Field(pattern=f"^{LAYER_NAME}$")], FiniteFloat], Field(max_length=MAX_PATTERNS)
    ] = {}
    base_model_name_or_path: str = ""

    @model_validator(mode="before")
    @classmethod
    def check_served(cls, values: Any) -> Any:
        """The fields that are not null. Raises AdapterFault."""
        if not isinstance(values, dict):
            return values
        if (kind := str(values.get("peft_type"))) != "LORA":
            raise AdapterFault(f"its peft_type is {kind[:64]}; LORA is served")
        if refused := next((name for field, name in REFUSED.items() if values.get(field)), None):
            raise AdapterFault(f"it has {refused}: not served; merge it into the model")
        if (bias := values.get("bias") or "none") != "none":
            raise AdapterFault(f"it has trained biases (bias: {str(bias)[:64]}), which are not served")
        start = values.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
            raise AdapterFault(
                f"its training has changed the base model, too (init_lora_weights: {start[:64]}): save it "
                "again with PEFT's path_initial_model_for_weight_conversion"
            )
        return {name: value for name, value in values.items() if value is not None}

    @property
    def max_rank(self) -> int:
        return max([self.r, *self.rank_pattern.values()])

    def scaling(self, layer: str, rank: int) -> float:
        """What the product of a layer's matrices is multiplied with. The first pattern counts, as in PEFT."""
        own = (alpha for pattern, alpha in self.alpha_pattern.items() if is_named(layer, pattern))
        alpha = next(own, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def is_named(layer: str, pattern: str) -> bool:
    name = pattern.strip("^$").replace("\\", "")
    return layer == name or (pattern[0] != "^" and layer.endswith(f".{name}"))


def read_config(folder: Path) -> AdapterConfig:
    """Return the config of an adapter that has weights, too. Raises AdapterFault if it cannot be served."""
    file = folder / CONFIG
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise AdapterFault(f"{folder} has no {CONFIG}") from None
    except OSError as error:
        raise AdapterFault(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterFault(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        config = AdapterConfig.model_validate_json(data)
    except ValidationError as errors:
        raise AdapterFault(f"its {CONFIG} cannot be read: {first_error(errors)}") from errors
    if not (folder / WEIGHTS).is_file():
        raise AdapterFault(f"{folder} has no {WEIGHTS}; pickled weights (.bin) are not read")
    return config


def find_folder(path: str) -> tuple[Path, str]:
    """Return the folder of an adapter, after downloading it if need be, and the path by which others find the
    same: of a hub id with the commit. Raises AdapterFault.

    Args:
        path: a folder, or a hub id, perhaps with `@revision`.
    """
    try:
        if (folder := Path(path).expanduser()).is_dir():
            return folder.resolve(), str(folder.resolve())
    except (OSError, RuntimeError) as error:  # such as a name that is too long, or `~` with one of no user
        raise AdapterFault(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    hub_id, _, revision = path.partition("@")
    if not HUB_ID.fullmatch(hub_id):
        raise AdapterFault(f"there is no folder {path}")
    try:
        folder = model_files.download(hub_id, revision or None, model_files.no_progress, [*FILES])
    except SettingError as error:
        raise AdapterFault(error.cause) from error
    return folder, f"{hub_id}@{folder.name}"


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of an adapter's files, in hexadecimal digits. Raises AdapterFault."""
    whole = hashlib.sha256()
    try:
        for name in FILES:
            with (folder / name).open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise AdapterFault(f"{folder} cannot be read: {error.strerror or error}") from error
    return whole.hexdigest()


def find_adapter(source: AdapterSource) -> PoolAdapter:
    """Return the record of an adapter that a person names. Raises AdapterFault if it cannot be served."""
    folder, path = find_folder(source.path)
    config = read_config(folder)
    return PoolAdapter(
        source.name,
        path,
        digest_of(folder),
        rank=config.max_rank,
        base_model=config.base_model_name_or_path,
        added_ms=int(1000 * time.time()),
    )
