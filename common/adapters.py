"""LoRA adapters of a pool: their messages, their configs in PEFT's format, and their files, without torch.

An adapter is a folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`. Kinds that
are not served are refused by name.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import model_files
from common.ids import HUB_ID
from common.messages.codec import wire_field
from common.settings.settings import SettingError
from common.settings.types import AdapterSource

SHOWN_DIGITS = 16
"""Digits of an adapter's digest in its key."""
LOADING, READY, LEAVING = "loading", "ready", "leaving"
"""States of an adapter: workers load it, requests may name it, or it goes once no live request has it."""


@dataclass(frozen=True, slots=True)
class PoolAdapter:
    """A LoRA adapter of a pool.

    Attributes:
        name: by which clients ask for it.
        path: its folder, or its hub id, perhaps with `@revision`; each worker finds it there.
        digest: SHA-256 of its files, in hexadecimal digits: a worker that finds other files refuses it.
        state: LOADING, READY or LEAVING.
        rank: the largest of its matrices, by its configuration.
        base_model: that it was made for, by its configuration.
        added_ms: Unix time in ms; a record that is written anew has another one.
        failure: how an engine ended that loaded it; workers that do not have it yet refuse it.
    """

    name: str = wire_field("n")
    path: str = wire_field("p")
    digest: str = wire_field("d")
    state: str = wire_field("s", default=LOADING)
    rank: int = wire_field("r", default=0)
    base_model: str = wire_field("b", default="")
    added_ms: int = wire_field("a", default=0)
    failure: str = wire_field("f", default="")

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


CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
MAX_PATTERNS, MAX_PATTERN_CHARS = 4096, 1024
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
LITERAL = re.compile(r"(\^?)((?:[\w-]|\\?\.)+)\$?")
"""A pattern that is a name, or the end of one; a dot stands for itself. PEFT itself writes no others."""


class AdapterFault(Exception):
    """An adapter that cannot be served. `str()` says why, and begins without a capital."""


MatchesExpression = Callable[[str, str], bool]
"""(regular expression, whole text) → whether it matches. It may raise AdapterFault."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What of the config says what an adapter computes.

    Attributes:
        ranks, alphas: patterns of names of layers → their own values.
        root_scaling: rank-stabilised, alpha / sqrt(rank) (arXiv:2312.03732).
        base_model: that it was made for; empty if it does not say.
    """

    rank: int
    alpha: float
    root_scaling: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    base_model: str = field(default="")

    def scaling(self, layer: str, matches: MatchesExpression) -> float:
        """What the product of a layer's matrices is multiplied with."""
        rank, alpha = self.rank_of(layer, matches), value_of(self.alphas, layer, self.alpha, matches)
        return alpha / (math.sqrt(rank) if self.root_scaling else rank)

    def rank_of(self, layer: str, matches: MatchesExpression) -> int:
        return int(value_of(self.ranks, layer, self.rank, matches))


def value_of(patterns: Mapping[str, float], layer: str, default: float, matches: MatchesExpression) -> float:
    """The value of the first pattern that a layer's name ends with, as PEFT takes them."""
    for pattern, value in patterns.items():
        if literal := LITERAL.fullmatch(pattern):
            name = literal[2].replace("\\", "")
            found = layer == name or (not literal[1] and layer.endswith(f".{name}"))
        else:
            found = matches(rf"(.*\.)?({pattern})$", layer)
        if found:
            return value
    return default


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises AdapterFault."""
    values = read_values(folder / CONFIG_FILE)
    if (kind := str(values.get("peft_type"))) != "LORA":
        raise AdapterFault(f"its peft_type is {kind[:64]}; LORA is served")
    if refused := next((name for field, name in REFUSED.items() if values.get(field)), None):
        raise AdapterFault(f"it has {refused}: not served; merge it into the model")
    if (bias := values.get("bias") or "none") != "none":
        raise AdapterFault(f"it has trained biases (bias: {str(bias)[:64]}), which are not served")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise AdapterFault(
            f"its training has changed the base model, too (init_lora_weights: {start[:64]}): save it again "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    try:
        return make_config(values)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise AdapterFault(f"its {CONFIG_FILE} has values of a wrong type: {error}") from error


def read_values(file: Path) -> dict[str, Any]:
    """The fields of a config. Raises AdapterFault."""
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterFault(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise AdapterFault(f"{file.parent} has no {CONFIG_FILE}") from None
    except OSError as error:
        raise AdapterFault(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterFault(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise AdapterFault(f"{file} is no JSON object")
    return values


def make_config(values: Mapping[str, Any]) -> AdapterConfig:
    """Raises AdapterFault; ValueError, TypeError, AttributeError and ArithmeticError for values that mean
    nothing.
    """
    ranks = {key: positive(rank) for key, rank in (values.get("rank_pattern") or {}).items()}
    alphas = {key: finite(alpha) for key, alpha in (values.get("alpha_pattern") or {}).items()}
    if len(ranks) > MAX_PATTERNS or len(alphas) > MAX_PATTERNS:
        raise AdapterFault(f"its rank_pattern or alpha_pattern has more than {MAX_PATTERNS} entries")
    if any(len(pattern) > MAX_PATTERN_CHARS for pattern in (*ranks, *alphas)):
        raise AdapterFault(f"a pattern of its config has more than {MAX_PATTERN_CHARS} characters")
    return AdapterConfig(
        positive(values.get("r", 8)),
        finite(values.get("lora_alpha", 8)),
        bool(values.get("use_rslora")),
        ranks,
        alphas,
        str(values.get("base_model_name_or_path") or ""),
    )


def positive(rank: Any) -> int:
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"a rank of {rank!r}")
    return rank


def finite(alpha: Any) -> float:
    if not math.isfinite(number := float(alpha)):
        raise ValueError(f"an alpha of {alpha!r}")
    return number


CONFIG, WEIGHTS = FILES = (CONFIG_FILE, "adapter_model.safetensors")
OLDER_WEIGHTS = "adapter_model.bin"


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


def read_config(folder: Path) -> AdapterConfig:
    """Return the config of an adapter that has weights, too. Raises AdapterFault if it cannot be served."""
    config = read_adapter_config(folder)
    if not (folder / WEIGHTS).is_file():
        has_older = (folder / OLDER_WEIGHTS).is_file()
        older = f"; {OLDER_WEIGHTS} is not read: save it with safetensors" if has_older else ""
        raise AdapterFault(f"{folder} has no {WEIGHTS}{older}")
    return config


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of an adapter's files, in hexadecimal digits. Raises OSError."""
    whole = hashlib.sha256()
    for name in FILES:
        with (folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

FACTOR = re.compile(r"\.lora_(A|embedding_A)\b")


def find_adapter(source: AdapterSource) -> PoolAdapter:
    """Return the record of an adapter that a person names. Raises AdapterFault if it cannot be served."""
    try:
        folder = find_folder(source.path)
        config, path, digest = read_config(folder), folder / WEIGHTS, digest_of(folder)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = file.read(size) if size <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise AdapterFault(f"{source.path} cannot be read: {error.strerror or error}") from error
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
        digest,
        rank=max(ranks),
        base_model=config.base_model,
        added_ms=int(1000 * time.time()),
    )
