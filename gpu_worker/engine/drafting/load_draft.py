"""Loading of what proposes tokens beside a model: a smaller model, or heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from common import model_files
from common.model_files import CONFIG_FILE, TOKENIZER_FILE, Progress, read_json
from common.settings.settings import SettingError, Settings
from common.settings.speculation import (
    CONFIG,
    DRAFT_MODEL,
    EAGLE3,
    MEDUSA,
    MLP_SPECULATOR,
    NO_METHOD,
    Speculation,
)
from gpu_worker.engine.drafting.load_heads import HEADS, load_eagle, load_heads
from gpu_worker.engine.model.config import read_config
from gpu_worker.engine.model.families import register_family
from gpu_worker.engine.model.load import assemble, attach_empty, name_of, read_model, try_to_fuse
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.model.quantized_linears import check_fp8
from gpu_worker.engine.model.warmup import max_step_tokens
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from gpu_worker.protocol import UnservableModel, first_cause

OF_THE_TARGET = ("quantize", "rope_scaling", "rope_factor", "speculative_config")
"""Settings that say nothing of the model that proposes."""


def load_draft(
    settings: Settings, path: Path, target: LoadedModel, communicator: Communicator, progress: Progress
) -> Draft | None:
    """Load what proposes tokens for `target`, which lies at `path`; None if no model does. One rank proposes
    for all: the one that samples. Raises SettingError of SPECULATIVE_CONFIG.
    """
    speculation = speculation_of(settings, path)
    if not speculation.model:
        return None
    if target.states.mixers:
        kind = target.model.config.model_type
        raise SettingError(CONFIG, f"states of rows of {kind} cannot go back from wrong proposals")
    if communicator.num_stages > 1:  # of a speculator that config.json names; others are refused before
        cause = "a model that proposes tokens cannot be combined with PIPELINE_PARALLEL_SIZE"
        raise SettingError("speculate", cause)
    try:
        dtype = name_of(target.geometry.dtype)
        found = model_files.resolve(speculation.model, speculation.revision, progress, dtype=dtype)
        method = method_of(found, speculation)
        if method == EAGLE3:
            check_combinations(method, settings)
            return load_eagle(found, speculation, settings, target, communicator)
        if method in HEADS:
            check_combinations(method, settings)
            draft = load_heads(
                HEADS[method], found, replace(speculation, method=method), target, communicator
            )
            draft.max_states = max_step_tokens(settings, target.device)
            return draft
        return load_model(found, speculation, settings, target, communicator, progress)
    except SettingError as error:
        raise SettingError(CONFIG, error.cause) from error
    except UnservableModel as error:
        raise SettingError(CONFIG, f"{speculation.model} cannot propose tokens: {error}") from error


def speculation_of(settings: Settings, path: Path) -> Speculation:
    """How tokens are proposed: SPECULATE alone takes the heads that the model's config.json names, as TGI
    does, if it names any. Raises SettingError.
    """
    found = settings.speculation
    speculator = read_json(path / CONFIG_FILE).get("speculator")
    if settings.speculative_config or not settings.speculate or not isinstance(speculator, dict):
        return found
    heads = Path(str(speculator.get("path") or speculator.get("name") or ""))
    relative = path / heads
    model = str(relative if relative.is_dir() else heads)
    return replace(found, method=NO_METHOD, model=model)


def method_of(path: Path, speculation: Speculation) -> str:
    """The method of the files at `path`. Raises SettingError if SPECULATIVE_CONFIG names another."""
    config = read_json(path / CONFIG_FILE)
    kind = str(config.get("model_type"))
    names = " ".join(config.get("architectures") or ()).lower()
    found = DRAFT_MODEL
    if kind == "medusa" or "medusa_num_heads" in config:
        found = MEDUSA
    elif kind == "mlp_speculator" or "mlpspeculator" in names:
        found = MLP_SPECULATOR
    elif "eagle3" in names or "eagle3" in str(config.get("speculators_model_type")):
        found = EAGLE3
    elif "eagle" in names or "mtp" in names or "medusa" in names:
        cause = f"{' '.join(config['architectures'])} is no kind of heads that is served"
        raise SettingError(CONFIG, f"{speculation.model} cannot propose tokens: {cause}")
    if speculation.method not in (NO_METHOD, found):
        raise SettingError(CONFIG, f"method is {speculation.method}, but {speculation.model} is a {found}")
    return found


def check_combinations(method: str, settings: Settings) -> None:
    """Raises SettingError for what heads cannot be combined with."""
    if settings.deterministic:
        cause = f"{method} needs hidden states, which steps of a fixed shape do not keep (DETERMINISTIC)"
        raise SettingError(CONFIG, cause)


def load_model(
    path: Path,
    speculation: Speculation,
    settings: Settings,
    target: LoadedModel,
    communicator: Communicator,
    progress: Progress,
) -> Draft:
    """A smaller model with the same vocabulary. Raises SettingError."""
    if not speculation.num_tokens:
        raise SettingError(CONFIG, f"{DRAFT_MODEL} needs num_speculative_tokens")
    check_vocabulary(speculation.model, path, target)
    if not communicator.samples:
        return Draft(DRAFT_MODEL, speculation.num_tokens)
    progress(f"loading {speculation.model}, which proposes tokens")
    changed: dict[str, Any] = dict.fromkeys(OF_THE_TARGET)
    changed |= {"model_id": speculation.model, "tokenizer_name": str(target.tokenizer)}
    changed |= {"speculate": 0, "enable_lora": False}
    own = settings.model_copy(update=changed)
    dtype, device = target.geometry.dtype, target.device
    config = read_config(path, own)
    check_fp8(config, own, device, dtype)
    register_family(config.model_type)
    read = read_model(path, config, dtype, device, own, SINGLE_RANK)
    loaded = assemble(own, path, config, read, dtype, device)
    cause = first_cause(
        (loaded.ropes, "its rotary frequencies depend on the length of the prompt"),
        (loaded.states.mixers, "its states cannot go back from wrong proposals"),
    )
    if cause:
        raise SettingError(CONFIG, f"{speculation.model} cannot propose tokens: {cause}")
    attach_empty(loaded, SINGLE_RANK)
    try_to_fuse(loaded)
    return Draft(DRAFT_MODEL, speculation.num_tokens, loaded.model, loaded)


def check_vocabulary(name: str, path: Path, target: LoadedModel) -> None:
    """Raises SettingError unless each token of one model is the same token in the other. Where only one has a
    tokenizer, their sizes are compared.
    """
    own, other = read_vocabulary(path), read_vocabulary(target.tokenizer)
    if own and other and own != other:
        different = sorted({*own.items()} ^ {*other.items()}, key=lambda item: (item[1], item[0]))[0]
        cause = f"its vocabulary is another: token {different[1]} is {different[0]!r} in one of both only"
        raise SettingError(CONFIG, f"{name} cannot propose tokens: {cause}")
    config = read_json(path / CONFIG_FILE)
    size = int((config.get("text_config") or config).get("vocab_size") or 0)
    if not (own and other) and size != target.vocab_size:
        cause = f"its vocabulary has {size} tokens, and {target.vocab_size} are needed"
        raise SettingError(CONFIG, f"{name} cannot propose tokens: {cause}")


def read_vocabulary(path: Path) -> dict[str, int]:
    """The tokens of a tokenizer.json → their ids; empty where there is none."""
    values = read_json(path / TOKENIZER_FILE) if (path / TOKENIZER_FILE).exists() else {}
    tokens = (values.get("model") or {}).get("vocab") or {}
    if isinstance(tokens, list):  # Unigram: (token, score), in the order of ids
        tokens = {token: number for number, (token, _) in enumerate(tokens)}
    added = {token["content"]: token["id"] for token in values.get("added_tokens") or ()}
    return {**tokens, **added} if tokens else {}
