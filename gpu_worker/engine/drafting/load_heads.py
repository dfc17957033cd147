"""Loading of heads that a checkpoint has for a model: Medusa's, an MLP speculator's, EAGLE-3's layer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.model_files import CONFIG_FILE, read_json
from common.settings.settings import SettingError, Settings
from common.settings.speculation import CONFIG, EAGLE3, MAX_SPECULATED, MEDUSA, MLP_SPECULATOR, Speculation
from gpu_worker.engine.attention.choose import choose_backend
from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.cpu.packed_linear import pack_linears
from gpu_worker.engine.drafting.eagle3 import Eagle3Head, names_of, read_eagle_config, recorded_layers
from gpu_worker.engine.drafting.medusa import MedusaHeads
from gpu_worker.engine.drafting.mlp_speculator import MlpSpeculatorHeads
from gpu_worker.engine.model.load import attach_empty
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.model.warmup import max_decoded_tokens, max_step_tokens
from gpu_worker.engine.model.weights import check_files
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from gpu_worker.engine.parallel.stage_model import WHOLE
from gpu_worker.engine.quantization.checkpoint import file_slices
from gpu_worker.engine.states.model_states import ModelStates
from gpu_worker.protocol import UnservableModel

HEADS: Mapping[str, Any] = {MEDUSA: MedusaHeads, MLP_SPECULATOR: MlpSpeculatorHeads}


def load_heads(
    kind: Any, path: Path, speculation: Speculation, target: LoadedModel, communicator: Communicator
) -> Draft:
    """Heads of a checkpoint, on the device of the model. Raises SettingError, UnservableModel."""
    config = read_json(path / CONFIG_FILE)
    hidden_size = target.model.config.get_text_config().hidden_size
    heads = kind.of(config, hidden_size, target.vocab_size)
    most = min(heads.num_heads, MAX_SPECULATED)
    if speculation.num_tokens > most:
        cause = f"num_speculative_tokens is {speculation.num_tokens}, but it has {most} heads"
        raise SettingError(CONFIG, f"{speculation.model}: {cause}")
    num_tokens = speculation.num_tokens or most
    if not communicator.samples:
        return Draft(speculation.method, num_tokens)
    check_files(path, speculation.model, is_plain=True)
    read_parameters(heads, dict(file_slices(path)))
    heads.to(target.device, target.geometry.dtype).eval().requires_grad_(False)
    state_bytes = hidden_size * target.geometry.dtype.itemsize
    return Draft(speculation.method, num_tokens, heads, state_bytes=state_bytes)


def load_eagle(
    path: Path,
    speculation: Speculation,
    settings: Settings,
    target: LoadedModel,
    communicator: Communicator,
) -> Draft:
    """The layer of an EAGLE-3 checkpoint, with a cache of its own. Raises SettingError, UnservableModel."""
    if not speculation.num_tokens:
        raise SettingError(CONFIG, f"{EAGLE3} needs num_speculative_tokens, 1 to {MAX_SPECULATED}")
    values = read_json(path / CONFIG_FILE)
    target_config = target.model.config.get_text_config()
    config = read_eagle_config(values, target_config.hidden_size)
    numbers = recorded_layers(values, target_config.num_hidden_layers)
    if not communicator.samples:
        return Draft(EAGLE3, speculation.num_tokens)
    check_files(path, speculation.model, is_plain=True)
    slices = dict(file_slices(path))
    has_embedding = any(name in slices for name in names_of("embed_tokens.weight"))
    if not has_embedding and communicator.world_size > 1:
        raise UnservableModel(
            "it has no embed_tokens, and those of the model are on several ranks (NUM_SHARD)"
        )
    embedding = None if has_embedding else target.model.get_input_embeddings()
    size = int(values.get("draft_vocab_size") or config.vocab_size)
    layer = Eagle3Head(config, target_config.hidden_size, size, embedding)
    read_parameters(layer, slices, shared=() if has_embedding else ("embed_tokens.weight",))
    read_vocabulary_map(layer, slices, size, target.vocab_size)
    dtype, device = target.geometry.dtype, target.device
    layer.to(device, dtype).eval().requires_grad_(False)
    layer.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # frequencies stay float32
    if device.type == "cpu":
        pack_linears(layer, {})
    kv_dtype, context = target.geometry.kv_dtype, target.context
    geometry = Geometry([layer.layer_spec], target.geometry.block_size, dtype, kv_dtype)
    max_rows = max_decoded_tokens(settings.max_batch_size)
    backend = choose_backend(geometry, device, max_rows, -(-context // geometry.block_size))
    cached = LoadedModel(
        tokenizer=target.tokenizer,
        model=layer,
        attentions=[layer.self_attn],
        geometry=backend.geometry,
        device=device,
        backend=backend,
        ropes=[],
        context=context,
        eos_ids=[],
        vocab_size=size,
        recompute_length=None,
        stage=WHOLE,
        states=ModelStates(device),
    )
    attach_empty(cached, SINGLE_RANK)
    recorded = [layers_of(target.model)[number] for number in numbers]
    max_states = max_step_tokens(settings, device)
    state_bytes = len(numbers) * target_config.hidden_size * dtype.itemsize
    return Draft(EAGLE3, speculation.num_tokens, layer, cached, max_states, state_bytes, recorded)


def layers_of(model: Any) -> Any:
    """The list of a model's decoder layers. Raises UnservableModel."""
    number = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return module
    raise UnservableModel("the layers of the model are not found")


def read_vocabulary_map(layer: Any, slices: Mapping[str, Any], size: int, vocab_size: int) -> None:
    """Read which token of the model each of the draft's `size` tokens is. Raises UnservableModel."""
    if "d2t" in slices:
        offsets = slices["d2t"][...].long()
        ids = torch.arange(len(offsets)) + offsets
        if len(offsets) != size or bool(((ids < 0) | (ids >= vocab_size)).any()):
            raise UnservableModel(f"d2t does not name {size} of the model's {vocab_size} tokens")
        layer.draft_to_target.copy_(offsets)
    elif size > vocab_size:
        raise UnservableModel(f"its vocabulary has {size} tokens, and the model's {vocab_size}")


def read_parameters(heads: Any, slices: Mapping[str, Any], shared: Sequence[str] = ()) -> None:
    """Fill the parameters of heads from a checkpoint, without those `shared` with the model. Raises
    UnservableModel where one is missing, or has another shape.
    """
    parameters = dict(heads.named_parameters())
    for own, names in heads.names().items():
        if own in shared:
            continue
        name = next((name for name in names if name in slices), None)
        if name is None and own.startswith("blocks.") and own.endswith(".bias"):
            parameters[own].data.zero_()  # vLLM's may have none
            continue
        if name is None:
            raise UnservableModel(f"there are no weights {names[0]}")
        tensor = slices[name][...]
        if tensor.shape != parameters[own].shape:
            shape, needed = list(tensor.shape), list(parameters[own].shape)
            raise UnservableModel(f"{name} has the shape {shape}, and {needed} is needed")
        parameters[own].data.copy_(tensor)
