"""Quantising: a plain checkpoint becomes a quantised one, layer by layer. The inputs of a layer are the
outputs of the layers before it as they are quantised, so that its rounding makes up for theirs.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common import model_files
from common.quantize_job import GROUP_SIZES, WHOLE_ROW, QuantizeJob
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.model.config import cannot_serve, read_config
from gpu_worker.engine.model.families import register_family
from gpu_worker.engine.model.load import choose_device
from gpu_worker.engine.model.quantized_linears import ROUTERS
from gpu_worker.engine.model.weights import check_files, load_pretrained, quantization_method
from gpu_worker.engine.parallel.stages import find_layers
from gpu_worker.engine.parallel.tensor_parallel import parameter_finder
from gpu_worker.engine.quantization.checkpoint import read_tensors
from gpu_worker.engine.quantizing import checkpoint
from gpu_worker.engine.quantizing.rounding import Grid, Rounded, record_hessians, round_by_gptq
from gpu_worker.protocol import UnservableModel

ATTENTION = "eager"
"""transformers' own attention, written out: a sequence at a time, without a cache."""
BUNDLED = Path(__file__).with_name("calibration.txt")
LONGEST = 2048
"""Tokens of a sequence."""
NUM_PARTS = 8
"""A text is cut into at least that many sequences."""
SHORTEST = 16
"""Tokens of the shortest sequences."""


def quantize(job: QuantizeJob, settings: Settings) -> None:
    """Make a quantised checkpoint, and print where it is. Raises SettingError."""
    source, output = Path(job.source), Path(job.output)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = choose_device(settings.device, RankInfo())
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        model = open_model(source, settings, device)
        size = check_layers(model, job)
        texts = read_texts(job, model_files.read_tokenizer(source), model_files.context_length(source))
        count = sum(ids.shape[1] for ids in texts)
        say(f"quantising {settings.model_id} (gptq, {job.bits} bits) with {count} tokens on {device}")
        tensors = quantize_layers(job, model, size, texts)
    except (UnservableModel, ValueError) as error:
        cause = cannot_serve(settings.model_id, error).cause.replace("be served", "be quantised")
        raise SettingError("model_id", cause) from error
    rest = {name: tensor[...] for name, tensor in model.tensors.items() if name not in tensors}
    whole = {name: tensor for name, tensor in (rest | tensors).items() if tensor is not None}
    checkpoint.write(output, source, whole, checkpoint.config_of(job, size))
    before, after = (sum(file.stat().st_size for file in it.glob("*.safetensors")) for it in (source, output))
    say(f"{before / 2**20:.0f} MiB before, {after / 2**20:.0f} MiB after")
    print(output.absolute(), flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the model


@dataclass(eq=False)
class PlainModel:
    """A model in the dtype of its checkpoint, on the CPU.

    Attributes:
        whole: transformers' model.
        layers: its layers; `prefix` is their list's name.
        tensors: the checkpoint's, none read yet.
        keys: of a parameter, the name of its tensor in the checkpoint.
    """

    whole: Any
    layers: nn.ModuleList
    prefix: str
    tensors: Mapping[str, Any]
    keys: Mapping[str, str]
    device: torch.device


def open_model(path: Path, settings: Settings, device: torch.device) -> PlainModel:
    """Raises SettingError, UnservableModel."""
    config = read_config(path, settings)
    method = quantization_method(config, settings.model_id)
    if method:
        raise UnservableModel(f"it is quantised already ({method}), and plain weights are needed")
    register_family(config.model_type)
    check_files(path, settings.model_id, is_plain=True)
    source = functools.partial(AutoModelForCausalLM.from_pretrained, path, config=config)
    whole, tensors = load_pretrained(source, settings, dtype="auto"), read_tensors(path)
    whole.set_attn_implementation(ATTENTION)
    prefix = find_layers(whole, list(whole.pp_plan or {}))
    find, known = parameter_finder(whole), whole.state_dict().keys()
    keys = {find(key)[0]: key for key in tensors}
    for name, key in keys.items():
        if name not in known and len(tensors[key].get_shape()) > 1 and not key.startswith("lm_head."):
            raise UnservableModel(f"it has weights beside its text model's ({key}), which would stay plain")
    return PlainModel(whole, whole.get_submodule(prefix), prefix, tensors, keys, device)


def linears_of(layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a layer that are quantised, by their names in it: all but routers."""
    return {
        name: child
        for name, child in layer.named_modules()
        if type(child) is nn.Linear and not {*name.split(".")} & ROUTERS
    }


def check_layers(model: PlainModel, job: QuantizeJob) -> int:
    """The size of groups in all layers. Raises UnservableModel for a model that cannot be quantised, and
    SettingError for a size that does not divide a layer's inputs.
    """
    linears = linears_of(model.layers)
    experts = [name for name, own in model.layers.named_parameters() if own.dim() == 3]
    if experts:
        raise UnservableModel(f"its experts are one parameter ({experts[0]}); linear layers are quantised")
    if not linears:
        raise UnservableModel(f"{type(model.whole).__name__} has no linear layers that can be quantised")
    multiple = checkpoint.WORD_BITS // job.bits
    for name, linear in linears.items():
        if linear.out_features % multiple:
            raise UnservableModel(
                f"layer {name} has {linear.out_features} outputs, no multiple of {multiple}, with which "
                f"{job.bits} bits are packed"
            )
    sizes = GROUP_SIZES if job.group_size is None else (job.group_size,)
    for size in sizes:
        undivided = [(name, it.in_features) for name, it in linears.items() if it.in_features % size]
        if size == WHOLE_ROW or not undivided:
            return size
    name, count = undivided[0]
    raise SettingError(
        "--group-size",
        f"{size} does not divide the {count} inputs of layer {name}; {WHOLE_ROW} is one group a row",
    )


def read_texts(job: QuantizeJob, tokenizer: Tokenizer, context: int) -> list[torch.Tensor]:
    """Sequences of tokens, int64 [1, tokens] each. Raises SettingError if the text cannot be read or is too
    short.
    """
    path = Path(job.calibration) if job.calibration else BUNDLED
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--calibration", f"{path} cannot be read as text: {error}") from error
    ids = tokenizer.encode(text).ids[: job.max_tokens]
    length = min(LONGEST, context, len(ids) // NUM_PARTS)
    if length < SHORTEST:
        raise SettingError(
            "--calibration", f"{path} has {len(ids)} tokens, and at least {SHORTEST * NUM_PARTS} are needed"
        )
    begins = range(0, len(ids) - length + 1, length)
    return [torch.tensor([ids[begin : begin + length]]) for begin in begins]


# --- its layers


Run = Callable[[torch.Tensor], torch.Tensor]
"""A layer's forward for one text: states of the layer before, float32 [1, tokens, hidden] → its own."""


@torch.inference_mode()
def quantize_layers(
    job: QuantizeJob, model: PlainModel, size: int, texts: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """The tensors [...] of any dtype that quantising makes, by their names in the checkpoint, and None for
    those that they replace.
    """
    states, runs = first_states(model, texts)
    made: dict[str, torch.Tensor | None] = {}
    for number, layer in enumerate(model.layers):
        begun_s = time.monotonic()
        dtypes = {own.dtype for own in layer.parameters()}
        dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16
        layer.to(model.device, torch.float32)
        linears = linears_of(layer)
        forwards = [functools.partial(own[number], it) for own, it in zip(runs, states, strict=True)]
        hessians = record_hessians([*linears.values()], forwards)
        off = whole = 0.0
        for name, linear in linears.items():
            grid = Grid(job.bits, dtype, linear.in_features if size == WHOLE_ROW else size)
            weight = linear.weight.detach().clone()
            rounded = round_by_gptq(weight, hessians[linear], grid, job.act_order, job.damping)
            linear.weight.copy_(rounded.widen())
            off += float((linear.weight - weight).norm() ** 2)
            whole += float(weight.norm() ** 2)
            key = model.keys[f"{model.prefix}.{number}.{name}.weight"]
            host = Rounded(rounded.quants.cpu(), rounded.scales.cpu(), rounded.zero)
            made[key] = None
            for field, tensor in checkpoint.fields_of(host, job.bits, dtype).items():
                made[key.removesuffix("weight") + field] = tensor.contiguous()
        states = [forward() for forward in forwards]
        layer.to("meta")
        error, seconds = (off / whole) ** 0.5, time.monotonic() - begun_s
        say(f"layer {number + 1} of {len(model.layers)}: error {error:.2%}, {seconds:.1f} s")
    return made


def first_states(
    model: PlainModel, texts: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[list[Run]]]:
    """For each text int64 [1, tokens] the states before the first layer, float32 [1, tokens, hidden], and the
    forward of each layer with the masks and positions that the model gives it. Raises UnservableModel.
    """
    inside = {id(own) for own in model.layers.parameters()}
    for own in model.whole.parameters():
        if id(own) not in inside:
            own.data = own.data.float()
    model.layers[0].float()
    states: list[torch.Tensor] = []
    runs: list[list[Run]] = []
    forwards = [layer.forward for layer in model.layers]
    form: list[Any] = []

    def note(forward: Callable[..., Any], hidden: torch.Tensor, *others: Any, **options: Any) -> Any:
        form[:] = form or [forward(hidden, *others, **options)]
        states.append(hidden)
        runs[-1].append(functools.partial(run, model.device, forward, others, options))
        return (hidden, *form[0][1:]) if isinstance(form[0], tuple) else hidden

    for layer, forward in zip(model.layers, forwards, strict=True):
        layer.forward = functools.partial(note, forward)
    for ids in texts:
        runs.append([])
        model.whole(input_ids=ids, use_cache=False)
        if len(runs[-1]) != len(forwards):
            raise UnservableModel("its layers do not run once each")
    for layer, forward in zip(model.layers, forwards, strict=True):
        layer.forward = forward
    return states[:: len(forwards)], runs


def run(
    device: torch.device,
    forward: Callable[..., Any],
    others: tuple[Any, ...],
    options: dict[str, Any],
    states: torch.Tensor,
) -> torch.Tensor:
    """A layer's output states, as Run has it."""
    moved = tree_map_only(torch.Tensor, lambda it: it.to(device), (states, others, options))
    output = forward(moved[0], *moved[1], **moved[2])
    own: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return own
