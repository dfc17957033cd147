"""The config of a LoRA adapter in PEFT's format: `adapter_config.json`. Kinds that are not served are refused
by name.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
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


class AdapterError(ValueError):
    """An adapter cannot be served; the text says why."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What of the config says what an adapter computes.

    Attributes:
        ranks, alphas: patterns of names of layers → their own values.
        root_scaling: rank-stabilised, alpha / sqrt(rank) (arXiv:2312.03732).
    """

    rank: int
    alpha: float
    root_scaling: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def scaling(self, layer: str) -> float:
        """What the product of a layer's matrices is multiplied with."""
        rank, alpha = self.rank_of(layer), value_of(self.alphas, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.root_scaling else rank)

    def rank_of(self, layer: str) -> int:
        return int(value_of(self.ranks, layer, self.rank))


def value_of(patterns: Mapping[str, float], layer: str, default: float) -> float:
    """The value of the first pattern that a layer's name ends with, as PEFT takes them."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises AdapterError."""
    values = read_values(folder / CONFIG_FILE)
    if (kind := values.get("peft_type")) != "LORA":
        raise AdapterError(f"its kind is {kind} (peft_type); only LORA is served")
    if refused := next((name for field, name in REFUSED.items() if values.get(field)), None):
        raise AdapterError(f"it has {refused}: not served")
    if (bias := values.get("bias") or "none") != "none":
        raise AdapterError(f"it has trained biases (bias: {bias}): not served")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"its training has changed the base model, too (init_lora_weights: {start}): save it again with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    try:
        return make_config(values)
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise AdapterError(f"its {CONFIG_FILE} has values of a wrong type: {error}") from error


def read_values(file: Path) -> dict[str, Any]:
    """The fields of a config. Raises AdapterError."""
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{file} is not a JSON object")
    return values


def make_config(values: Mapping[str, Any]) -> AdapterConfig:
    """Raises ValueError, TypeError, AttributeError and re.error for values that mean nothing."""
    ranks = {key: positive(rank) for key, rank in (values.get("rank_pattern") or {}).items()}
    alphas = {key: float(alpha) for key, alpha in (values.get("alpha_pattern") or {}).items()}
    for key in (*ranks, *alphas):
        re.compile(key)
    alpha = values.get("lora_alpha", 8)
    return AdapterConfig(
        positive(values.get("r", 8)), float(alpha), bool(values.get("use_rslora")), ranks, alphas
    )


def positive(rank: Any) -> int:
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"a rank of {rank!r}")
    return rank
