"""Quantising: a plain checkpoint becomes one of GPTQ (version 1, arXiv:2210.17323), layer by layer. The
inputs of a layer are the outputs of the layers before it as they are quantised, so that its rounding makes up
for theirs. The new checkpoint moves to its place when it is whole.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from common import model_files
from common.quantize_job import GROUP_SIZES, WHOLE_ROW, QuantizeJob
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cpu.packed_linear import pack_quants
from gpu_worker.engine.model.families import register_family
from gpu_worker.engine.model.load import choose_device
from gpu_worker.engine.model.quantized_linears import rounded_linears
from gpu_worker.engine.model.weights import (
    cannot_serve,
    check_files,
    load_pretrained,
    quantization_method,
    read_config,
)
from gpu_worker.engine.parallel.model_parallel import StageEnd, find_layers, parameter_finder
from gpu_worker.engine.quantization.checkpoint import Fields, read_tensors
from gpu_worker.protocol import UnservableModel, refuse

SHRINKS = [1 - step / 20 for step in range(11)]
"""Parts of a group's range that are tried: a narrower one clips the largest weights, and has finer steps."""
COLUMNS = 128
"""Inputs after which GPTQ changes the others, all at once."""
MAX_DAMPING = 1.0


@dataclass(frozen=True)
class Grid:
    """Integers from 0 to 2**bits - 1, the middle of which is the zero: they stand for (quant - zero) * scale.
    Scales are numbers of `dtype`, and `size` inputs share one.
    """

    bits: int
    dtype: torch.dtype
    size: int

    @property
    def zero(self) -> int:
        return int(2 ** (self.bits - 1))

    def quants(self, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Whole numbers, float32 as the weights [..., numbers]."""
        return (weights / scales + self.zero).round().clamp(0, 2 * self.zero - 1)

    def widen(self, quants: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """quants [outputs, inputs], scales float32 [outputs, groups] → float32 [outputs, inputs]"""
        return (quants.float() - self.zero) * scales.repeat_interleave(self.size, 1)

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """For weights float32 [outputs, inputs] the scales of SHRINKS for which the squared errors of a group
        are the least, rounded to the nearest integers: float32 [outputs, groups].
        """
        groups = weight.reshape(len(weight), -1, self.size)
        whole = groups.abs().amax(-1, keepdim=True) / (self.zero - 0.5)
        scales, least = torch.ones_like(whole), torch.full_like(whole, torch.inf)
        for shrink in SHRINKS:
            tried = (whole * shrink).to(self.dtype).float()
            tried = torch.where(tried > 0, tried, 1.0)
            errors = ((self.quants(groups, tried) - self.zero) * tried - groups).pow(2).sum(-1, keepdim=True)
            better = errors < least
            scales, least = torch.where(better, tried, scales), torch.where(better, errors, least)
        return scales[..., 0]


def record_hessians(
    linears: Sequence[nn.Linear], forward: Callable[[torch.Tensor], object], states: Sequence[torch.Tensor]
) -> dict[nn.Module, torch.Tensor]:
    """By linear layer the mean of its inputs' outer products, float32 [inputs, inputs], where the layer that
    has them gets states, float32 [1, tokens, hidden] each. Layers that get one tensor, one after the other,
    share it.
    """
    hessians: dict[nn.Module, torch.Tensor] = {}
    counts: Counter[nn.Module] = Counter()
    last: list[Any] = [None, None]

    def note(linear: Any, arguments: Any) -> None:
        if arguments[0] is not last[0]:
            rows = arguments[0].flatten(0, -2).float()
            own = hessians.setdefault(linear, rows.new_zeros(rows.shape[1], rows.shape[1]))
            counts[linear] += len(rows)
            own.lerp_(rows.T @ rows / len(rows), len(rows) / counts[linear])
            last[:] = arguments[0], own
        hessians[linear] = last[1]

    hooks = [linear.register_forward_pre_hook(note) for linear in linears]
    for own in states:
        forward(own)
    for hook in hooks:
        hook.remove()
    return hessians


def round_by_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, act_order: bool, damping: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights float32 [outputs, inputs] input by input, and change those that are left such that the
    outputs stay near. `hessian` float32 [inputs, inputs] is the mean of the inputs' outer products. With
    `act_order` the inputs with the largest values are rounded first. Scales are chosen before, so that groups
    lie in turn → quants uint8 [outputs, inputs], and scales. Raises SettingError.
    """
    outputs, inputs = weight.shape
    unused = hessian.diagonal() == 0
    left = torch.where(unused, 0.0, weight)
    hessian = hessian + torch.diag(unused.float())
    scales = grid.scales(left)
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(inputs)
    order = order.to(weight.device)
    factor = inverse_factor(hessian[order][:, order], damping)
    left = left[:, order]
    quants = torch.zeros_like(left)
    groups = (order // grid.size).tolist()
    num_threads = torch.get_num_threads()
    for begin in range(0, inputs, COLUMNS):
        end = min(begin + COLUMNS, inputs)
        errors = left.new_zeros(outputs, end - begin)
        torch.set_num_threads(1)  # for one column, waiting for others takes longer than computing
        for place in range(begin, end):
            scale = scales[:, groups[place]]
            quants[:, place] = grid.quants(left[:, place], scale)
            error = (left[:, place] - (quants[:, place] - grid.zero) * scale) / factor[place, place]
            left[:, place + 1 : end].addr_(error, factor[place, place + 1 : end], alpha=-1)
            errors[:, place - begin] = error
        torch.set_num_threads(num_threads)
        left[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return quants[:, order.argsort()].to(torch.uint8), scales


def inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse, float32 [inputs, inputs]; damped more where a lack of
    calibration text needs it. Raises SettingError.
    """
    mean = hessian.diagonal().mean()
    while damping <= MAX_DAMPING:
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
        damping *= 10
    raise SettingError(
        "--calibration", "the inputs of a layer are not finite, or too much alike, for this text"
    )


WORD_BITS = 32
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Ends of names of files that have weights."""


def fields_of(grid: Grid, quants: torch.Tensor, scales: torch.Tensor) -> Fields:
    """A layer's tensors, of quants uint8 [outputs, inputs] and scales float32 [outputs, groups]; version 1
    stores zeros smaller by one.
    """
    return {
        "qweight": pack_quants(quants[None], grid.bits, 1)[0, ..., 0],
        "qzeros": pack_quants(torch.full_like(scales.T, grid.zero - 1)[None], grid.bits, 1)[0, ..., 0].T,
        "scales": scales.T.to(grid.dtype),
        "g_idx": torch.arange(quants.shape[1], dtype=torch.int32) // grid.size,
    }


def config_of(job: QuantizeJob, group_size: int) -> Mapping[str, Any]:
    """`quantization_config` in config.json."""
    return {
        "quant_method": "gptq",
        "bits": job.bits,
        "group_size": group_size,
        "desc_act": False,
        "static_groups": True,
        "sym": True,
        "true_sequential": False,
        "damp_percent": job.damping,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"tokenfleet {version('tokenfleet')}"]},
    }


def write(output: Path, source: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write tensors [...] of any dtype, their quantisation `config` and the other files of `source`; where
    that fails nothing is left. Raises SettingError.
    """
    folder = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True)
        save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
        for file in source.iterdir():
            if file.is_file() and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        path = folder / model_files.CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}, indent=2))
        model_files.follow_umask(folder)
        folder.rename(output)
    except OSError as error:
        cause = error.strerror or error
        raise SettingError("output", f"{output} cannot be written: {cause}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    write(output, source, whole, config_of(job, size))
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
    prefix = find_layers(whole)
    find, known = parameter_finder(whole), whole.state_dict().keys()
    keys = {find(key)[0]: key for key in tensors}
    for name, key in keys.items():
        if name not in known and len(tensors[key].get_shape()) > 1 and not key.startswith("lm_head."):
            raise UnservableModel(f"it has weights beside its text model's ({key}), which would stay plain")
    return PlainModel(whole, whole.get_submodule(prefix), prefix, tensors, keys, device)


def check_layers(model: PlainModel, job: QuantizeJob) -> int:
    """The size of groups in all layers. Raises UnservableModel for a model that cannot be quantised, and
    SettingError for a size that does not divide a layer's inputs.
    """
    linears = rounded_linears(model.layers)
    experts = [name for name, own in model.layers.named_parameters() if own.dim() == 3]
    multiple, kind = WORD_BITS // job.bits, type(model.whole).__name__
    undivided = [(name, it.out_features) for name, it in linears.items() if it.out_features % multiple]
    refuse(
        UnservableModel,
        (experts, f"its experts are one parameter ({', '.join(experts[:1])}); linear layers are quantised"),
        (not linears, f"{kind} has no linear layers that can be quantised"),
        *(
            (True, f"layer {name} has {count} outputs, no multiple of {multiple}, which {job.bits} bits need")
            for name, count in undivided
        ),
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


@torch.inference_mode()
def quantize_layers(
    job: QuantizeJob, model: PlainModel, size: int, texts: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """The tensors [...] of any dtype that quantising makes, by their names in the checkpoint, and None for
    those that they replace. All texts come to the first layer; the forward of the last one goes on, and in
    each layer all texts get its masks and positions, since they are equally long. Raises UnservableModel.
    """
    layers, device = model.layers, model.device
    inside = {id(own) for own in layers.parameters()}
    for own in model.whole.parameters():
        if id(own) not in inside:
            own.data = own.data.float()
    states: list[torch.Tensor] = []
    made: dict[str, torch.Tensor | None] = {}
    numbers = count()

    def reach(number: int, layer: Any, arguments: Any, options: Any) -> Any:
        if number == 0:
            states.append(arguments[0])
        if len(states) < len(texts):
            raise StageEnd(arguments[0])
        if number != next(numbers):
            raise UnservableModel("its layers do not run once each")
        begun_s, dtypes = time.monotonic(), {own.dtype for own in layer.parameters()}
        layers[:number].to("meta")
        layer.to(device, torch.float32)
        moved = tree_map_only(torch.Tensor, lambda it: it.to(device), (arguments, options))

        def run(own: torch.Tensor) -> torch.Tensor:
            output = layer.forward(own.to(device), *moved[0][1:], **moved[1])
            return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

        linears = rounded_linears(layer)
        hessians = record_hessians([*linears.values()], run, states)
        dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16
        off = whole = 0.0
        for name, linear in linears.items():
            grid = Grid(job.bits, dtype, linear.in_features if size == WHOLE_ROW else size)
            weight = linear.weight.detach().clone()
            rounded = round_by_gptq(weight, hessians[linear], grid, job.act_order, job.damping)
            linear.weight.copy_(grid.widen(*rounded))
            off += float((linear.weight - weight).norm() ** 2)
            whole += float(weight.norm() ** 2)
            key = model.keys[f"{model.prefix}.{number}.{name}.weight"]
            made[key] = None
            for field, tensor in fields_of(grid, *(part.cpu() for part in rounded)).items():
                made[key.removesuffix("weight") + field] = tensor.contiguous()
        states[:] = map(run, states)
        error, seconds = (off / whole) ** 0.5, time.monotonic() - begun_s
        say(f"layer {number + 1} of {len(layers)}: error {error:.2%}, {seconds:.1f} s")
        if number + 1 == len(layers):
            raise StageEnd(states[-1])
        return moved

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(functools.partial(reach, number), with_kwargs=True)
    for ids in texts:
        with contextlib.suppress(StageEnd):
            model.whole(input_ids=ids, use_cache=False)
    return made
