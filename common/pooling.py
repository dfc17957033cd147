"""Pooling: what a model's files say of a model that makes a vector or a score of a text. No torch.

Files are those of sentence-transformers (modules.json and the folders that it names,
sentence_bert_config.json) beside transformers' config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.messages.request import CLASSIFY, EMBED
from common.model_files import context_length, load_json, read_json
from common.settings.settings import SettingError, Settings

ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert")
"""Types of models whose tokens see each other in both directions."""
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")
"""Types of models whose first position is the one after that of padding."""
CLS, MEAN, LAST, MAX = "cls", "mean", "lasttoken", "max"
MODES = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_max_tokens": MAX,
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Fields of a folder of the module Pooling → names of ways to pool."""
SERVED = (CLS, MEAN, LAST, MAX)
SIZE_NAMES = ("hidden_size", "dim", "n_embd", "d_model")
CLASSIFIER = "ForSequenceClassification"
NO_LENGTH = 10**9
"""transformers writes a larger number for a tokenizer that bounds no length."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model makes its vectors or scores.

    Attributes:
        kind: EMBED or CLASSIFY.
        is_encoder: its tokens see each other in both directions, so a prompt is computed as a whole.
        method: how the vectors of a prompt's tokens become one.
        size: values of a vector; 1 for a score.
        dense: folders of linear layers that the pooled vector goes through.
        max_tokens: of an input; longer ones are refused or truncated.
        lowers: texts are put into small letters first.
        is_raw: scores are shown as the model computes them, by its own config.
    """

    kind: str
    is_encoder: bool
    method: str = LAST
    size: int = 0
    dense: tuple[Path, ...] = ()
    max_tokens: int = 0
    lowers: bool = False
    is_raw: bool = False

    @property
    def label(self) -> str:
        """What people call such a model."""
        return "an embedding model" if self.kind == EMBED else "a reranker"


def read_pooling(path: Path, settings: Settings) -> PoolingConfig | None:
    """How the model in a directory pools; None if it generates text. Raises SettingError if RUNNER asks for
    what it cannot do, or if its files ask for what is not served.
    """
    config = read_json(path / "config.json")
    modules = read_modules(path)
    is_classifier = any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or ())
    is_encoder = config.get("model_type") in ENCODERS
    runner = settings.runner
    if is_encoder and runner == "generate":
        cause = (
            f"generate, but {settings.model_id} ({config['model_type']}) is an encoder, which makes no text"
        )
        raise SettingError("runner", cause)
    if runner == "generate" or not (is_encoder or is_classifier or modules or runner == "pooling"):
        return None
    common: dict[str, Any] = {"is_encoder": is_encoder, "max_tokens": max_tokens(path, config)}
    if is_classifier:
        own = config.get("sentence_transformers") or {}
        count = int(config.get("num_labels") or len(config.get("id2label") or ()) or 2)
        if count != 1:
            cause = f"has {count} labels: only models with one score (rerankers) are served"
            raise SettingError("model_id", f"{settings.model_id} {cause}")
        return PoolingConfig(
            CLASSIFY,
            **common,
            method=str(config.get("classifier_pooling") or CLS) if is_encoder else LAST,
            size=1,
            is_raw=str(own.get("activation_fn", "")).endswith("Identity"),
        )
    return read_embedding(path, settings, modules, common)


def read_embedding(
    path: Path, settings: Settings, modules: Mapping[str, list[Path]], common: Mapping[str, Any]
) -> PoolingConfig:
    """How an embedding model pools. Raises SettingError."""
    default = MEAN if common["is_encoder"] else LAST
    folders = modules.get("Pooling", [])
    method = pooling_method(folders[0], settings) if folders else default
    if method != LAST and not common["is_encoder"]:
        cause = f"pools by {method}: of a decoder, whose prompts are computed in parts, only {LAST} is served"
        raise SettingError("model_id", f"{settings.model_id} {cause}")
    if others := sorted(modules.keys() - {"Transformer", "Pooling", "Normalize", "Dense", "Dropout"}):
        raise SettingError("model_id", f"{settings.model_id} has a module {others[0]}, which is not served")
    return PoolingConfig(
        EMBED,
        **common,
        method=method,
        size=vector_size(path, modules.get("Dense", [])),
        dense=tuple(modules.get("Dense", ())),
        lowers=bool(read_json(path / "sentence_bert_config.json").get("do_lower_case")),
    )


def read_modules(path: Path) -> dict[str, list[Path]]:
    """The modules of modules.json: the name of each class → the folders of its modules, in order."""
    file = path / "modules.json"
    found: dict[str, list[Path]] = {}
    for module in load_json(file, list, "list of objects"):
        if not isinstance(module, dict):
            raise SettingError("model_id", f"{file} is no JSON list of objects")
        kind = str(module.get("type", "")).rpartition(".")[2]
        found.setdefault(kind, []).append(path / str(module.get("path", "")))
    return found


def pooling_method(folder: Path, settings: Settings) -> str:
    """How the module Pooling in a folder pools. Raises SettingError."""
    values = read_json(folder / "config.json")
    given = values.get("pooling_mode")
    named = [given] if isinstance(given, str) else list(given or ())
    methods = named or [method for name, method in MODES.items() if values.get(name)] or [MEAN]
    if len(methods) > 1 or methods[0] not in SERVED:
        served = ", ".join(SERVED)
        raise SettingError(
            "model_id", f"{settings.model_id} pools by {' and '.join(methods)}; one of {served} is served"
        )
    return str(methods[0])


def vector_size(path: Path, dense: list[Path]) -> int:
    """Values of a vector: of the last hidden states, or of what comes out of the last linear layer. Raises
    SettingError.
    """
    config = read_json(path / "config.json")
    values = (part.get(name) for part in (config, config.get("text_config", {})) for name in SIZE_NAMES)
    sizes = [next((value for value in values if isinstance(value, int)), 0)]
    sizes += [read_json(folder / "config.json").get("out_features") or 0 for folder in dense]
    if not sizes[-1]:
        raise SettingError("model_id", f"{path / 'config.json'} has no {SIZE_NAMES[0]}")
    return int(sizes[-1])


def max_tokens(path: Path, config: Mapping[str, Any]) -> int:
    """The longest input: what sentence-transformers cuts inputs to, and at most what the model has positions
    for.
    """
    positions = context_length(path)
    if config.get("model_type") in OFFSET_POSITIONS:
        positions -= int(config.get("pad_token_id") or 0) + 1
    given = (
        read_json(path / "sentence_bert_config.json").get("max_seq_length"),
        read_json(path / "tokenizer_config.json").get("model_max_length"),
    )
    own = next((value for value in given if isinstance(value, int) and 0 < value < NO_LENGTH), positions)
    return min(own, positions)
