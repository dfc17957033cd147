"""Loading of what proposes tokens beside a model (a smaller model, Medusa's or an MLP speculator's heads,
EAGLE-3's layer), and the engine's drafter.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common import model_files
from common.model_files import CONFIG_FILE, TOKENIZER_FILE, Progress, read_json
from common.settings.settings import SettingError, Settings
from common.settings.speculation import (
    CONFIG,
    DRAFT_MODEL,
    EAGLE3,
    MAX_SPECULATED,
    MEDUSA,
    MLP_SPECULATOR,
    NO_METHOD,
    Speculation,
)
from gpu_worker.engine.cpu.packed_linear import pack_linears
from gpu_worker.engine.drafting.drafters import (
    Drafter,
    Eagle3Head,
    EagleDrafter,
    HeadDrafter,
    MedusaHeads,
    MlpSpeculatorHeads,
    ModelDrafter,
    read_eagle_config,
    recorded_layers,
)
from gpu_worker.engine.model.load import assemble, attach_empty, name_of, read_model, try_to_fuse
from gpu_worker.engine.model.model import Draft, LoadContext, LoadedModel
from gpu_worker.engine.model.weights import check_files, read_config, renamed
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from gpu_worker.engine.parallel.model_parallel import find_layers
from gpu_worker.engine.quantization.checkpoint import file_slices
from gpu_worker.engine.sampling.grammar import Matchers
from gpu_worker.protocol import UnservableModel, first_cause, refuse

OF_THE_TARGET = ("quantize", "rope_scaling", "rope_factor", "speculative_config")
"""Settings that say nothing of the model that proposes."""


def load_draft(target: LoadedModel, progress: Progress) -> Draft | None:
    """Load what proposes tokens for `target`; None if no model does. One rank proposes for all: the one that
    samples. Raises SettingError of SPECULATIVE_CONFIG.
    """
    settings = target.settings
    speculation = speculation_of(settings, target.path)
    if not speculation.model:
        return None
    if target.states.mixers:
        kind = target.model.config.model_type
        raise SettingError(CONFIG, f"states of rows of {kind} cannot go back from wrong proposals")
    if target.communicator.num_stages > 1:
        # of a speculator that config.json names; others are refused before
        cause = "a model that proposes tokens cannot be combined with PIPELINE_PARALLEL_SIZE"
        raise SettingError("speculate", cause)
    try:
        dtype = name_of(target.geometry.dtype)
        found = model_files.resolve(speculation.model, speculation.revision, progress, dtype=dtype)
        method = method_of(found, speculation)
        if method in (DRAFT_MODEL, EAGLE3) and not speculation.num_tokens:
            raise SettingError(CONFIG, f"{method} needs num_speculative_tokens, 1 to {MAX_SPECULATED}")
        if settings.deterministic and method != DRAFT_MODEL:
            cause = f"{method} needs hidden states, which steps of a fixed shape do not keep (DETERMINISTIC)"
            raise SettingError(CONFIG, cause)
        progress(f"loading {speculation.model}, which proposes tokens")
        own = speculation.model_copy(update={"method": method})
        return METHODS[method][0](found, own, target)
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
    return found.model_copy(update={"method": NO_METHOD, "model": model})


def method_of(path: Path, speculation: Speculation) -> str:
    """The method of the files at `path`. Raises SettingError if SPECULATIVE_CONFIG names another,
    UnservableModel.
    """
    config = read_json(path / CONFIG_FILE)
    kind = str(config.get("model_type"))
    names = " ".join(config.get("architectures") or ()).lower()
    found = first_cause(
        (kind == "medusa" or "medusa_num_heads" in config, MEDUSA),
        (kind == "mlp_speculator" or "mlpspeculator" in names, MLP_SPECULATOR),
        ("eagle3" in names or "eagle3" in str(config.get("speculators_model_type")), EAGLE3),
        (not any(other in names for other in ("eagle", "mtp", "medusa")), DRAFT_MODEL),
    )
    if not found:
        raise UnservableModel(f"{' '.join(config['architectures'])} is no kind of heads that is served")
    if speculation.method not in (NO_METHOD, found):
        raise SettingError(CONFIG, f"method is {speculation.method}, but {speculation.model} is a {found}")
    return found


def load_model(path: Path, speculation: Speculation, target: LoadedModel) -> Draft:
    """A smaller model with the same vocabulary. Raises SettingError, UnservableModel."""
    check_vocabulary(path, target)
    if not target.communicator.samples:
        return Draft(DRAFT_MODEL, speculation.num_tokens)
    changed: dict[str, Any] = dict.fromkeys(OF_THE_TARGET)
    changed |= {"model_id": speculation.model, "tokenizer_name": str(target.tokenizer)}
    changed |= {"speculate": 0, "enable_lora": False}
    own = target.settings.model_copy(update=changed)
    dtype, device = target.geometry.dtype, target.device
    config = read_config(path, own)
    context = LoadContext(path, config, dtype, device, own, SINGLE_RANK)
    loaded = read_model(context)
    refuse(
        UnservableModel,
        (config.is_encoder_decoder, "it has an encoder"),
        (loaded.ropes, "its rotary frequencies depend on the length of the prompt"),
        (loaded.states.mixers, "its states cannot go back from wrong proposals"),
    )
    attach_empty(loaded)
    try_to_fuse(loaded)
    return Draft(DRAFT_MODEL, speculation.num_tokens, loaded.model, loaded)


def check_vocabulary(path: Path, target: LoadedModel) -> None:
    """Raises UnservableModel unless a token of one model is the same token in the other. Where only one has a
    tokenizer, their sizes are compared.
    """
    folders = [folder for folder in (path, target.tokenizer) if (folder / TOKENIZER_FILE).exists()]
    vocabularies = [own for one in folders if (own := model_files.read_tokenizer(one).get_vocab())]
    config = read_json(path / CONFIG_FILE)
    size = int((config.get("text_config") or config).get("vocab_size") or 0)
    if len(vocabularies) == 2 and vocabularies[0] != vocabularies[1]:
        raise UnservableModel("its tokenizer has other tokens than the model's")
    if len(vocabularies) < 2 and size != target.vocab_size:
        raise UnservableModel(f"its vocabulary has {size} tokens, and {target.vocab_size} are needed")


def load_heads(path: Path, speculation: Speculation, target: LoadedModel) -> Draft:
    """Heads of a checkpoint, on the device of the model. Raises SettingError, UnservableModel."""
    config = read_json(path / CONFIG_FILE)
    hidden_size = target.model.config.get_text_config().hidden_size
    kind = MedusaHeads if speculation.method == MEDUSA else MlpSpeculatorHeads
    heads = kind(config, hidden_size, target.vocab_size)
    most = min(heads.num_heads, MAX_SPECULATED)
    if speculation.num_tokens > most:
        cause = f"num_speculative_tokens is {speculation.num_tokens}, but it has {most} heads"
        raise SettingError(CONFIG, f"{speculation.model}: {cause}")
    num_tokens = speculation.num_tokens or most
    if not target.communicator.samples:
        return Draft(speculation.method, num_tokens)
    check_files(path, speculation.model, is_plain=True)
    read_parameters(heads, path)
    heads.to(target.device, target.geometry.dtype).eval().requires_grad_(False)
    state_bytes = hidden_size * target.geometry.dtype.itemsize
    return Draft(speculation.method, num_tokens, heads, state_bytes=state_bytes)


def load_eagle(path: Path, speculation: Speculation, target: LoadedModel) -> Draft:
    """The layer of an EAGLE-3 checkpoint, with a cache of its own. Raises SettingError, UnservableModel."""
    values = read_json(path / CONFIG_FILE)
    target_config = target.model.config.get_text_config()
    config = read_eagle_config(values, target_config.hidden_size)
    numbers = recorded_layers(values, target_config.num_hidden_layers)
    if not target.communicator.samples:
        return Draft(EAGLE3, speculation.num_tokens)
    check_files(path, speculation.model, is_plain=True)
    has_embedding = any("embed_tokens.weight" in name for name, _ in file_slices(path))
    if not has_embedding and target.communicator.world_size > 1:
        raise UnservableModel(
            "it has no embed_tokens, and those of the model are on several ranks (NUM_SHARD)"
        )
    embedding = None if has_embedding else target.model.get_input_embeddings()
    size = int(values.get("draft_vocab_size") or config.vocab_size)
    layer = Eagle3Head(config, target_config.hidden_size, size, embedding)
    read_parameters(layer, path)
    ids = torch.arange(size) + layer.draft_to_target
    if bool(((ids < 0) | (ids >= target.vocab_size)).any()):
        raise UnservableModel(f"d2t does not name {size} of the model's {target.vocab_size} tokens")
    dtype, device = target.geometry.dtype, target.device
    layer.to(device, dtype).eval().requires_grad_(False)
    layer.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # frequencies stay float32
    if device.type == "cpu":
        pack_linears(layer)
    context = LoadContext(target.path, config, dtype, device, target.settings, SINGLE_RANK)
    context.layers = {layer.self_attn: layer.layer_spec}
    cached = assemble(layer, context)
    cached.vocab_size = size
    attach_empty(cached)
    layers = target.model.get_submodule(find_layers(target.model))
    recorded = [layers[number] for number in numbers]
    state_bytes = len(numbers) * target_config.hidden_size * dtype.itemsize
    return Draft(EAGLE3, speculation.num_tokens, layer, cached, state_bytes, recorded)


METHODS: Mapping[str, tuple[Callable[..., Draft], type[Drafter]]] = {
    DRAFT_MODEL: (load_model, ModelDrafter),
    EAGLE3: (load_eagle, EagleDrafter),
    MEDUSA: (load_heads, HeadDrafter),
    MLP_SPECULATOR: (load_heads, HeadDrafter),
}


def read_parameters(heads: Any, path: Path) -> None:
    """Fill the parameters of heads from a checkpoint. Raises UnservableModel where one is missing, or has
    another shape.
    """
    own = heads.state_dict()
    named = ((renamed(name, heads.names), tensor) for name, tensor in file_slices(path))
    tensors = {name: tensor[...] for name, tensor in named if name in own}
    for name in own.keys() - tensors.keys():
        if not re.fullmatch(heads.unneeded, name):
            raise UnservableModel(f"there are no weights {name}")
        if not name.startswith("embed_tokens."):  # which are the model's
            own[name].zero_()
    try:
        heads.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise UnservableModel(str(error).splitlines()[-1].strip()) from error


def make_drafter(loaded: LoadedModel, matchers: Matchers) -> Drafter | None:
    """None if no model proposes tokens."""
    draft = loaded.draft
    if draft is None:
        return None
    kind = Drafter if draft.model is None else METHODS[draft.method][1]
    return kind(draft, loaded, matchers)
