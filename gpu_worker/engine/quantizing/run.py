"""Run: a job of `tokenfleet quantize` from its model to the checkpoint in its place."""

import sys
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from common import model_files
from common.quantize_job import QuantizeJob
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.model.config import cannot_serve
from gpu_worker.engine.model.load import choose_device
from gpu_worker.engine.quantizing import formats
from gpu_worker.engine.quantizing.calibration import read_calibration
from gpu_worker.engine.quantizing.quantize import Quantizer, Result, check_layers
from gpu_worker.engine.quantizing.staged import StagedModel, open_model
from gpu_worker.engine.quantizing.writer import CheckpointWriter, check_room, writing
from gpu_worker.protocol import UnservableModel

PART_BYTES = 2**30
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def run(job: QuantizeJob, settings: Settings) -> Result:
    """Quantise a model. Raises SettingError."""
    source, output = Path(job.source), Path(job.output)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = choose_device(settings.device, RankInfo())
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        model = open_model(source, settings, device)
        size = check_layers(model, job)
        tokenizer = model_files.read_tokenizer(source)
        texts = read_calibration(job, tokenizer, model_files.context_length(source), device)
        check_room(output, bytes_after(model, job))
        quantizer = Quantizer(job, model, texts, size)
        count = sum(ids.shape[1] for ids in texts.sequences)
        say(f"quantising {settings.model_id} ({job.method}, {job.bits} bits) with {count} tokens on {device}")
        with writing(output) as writer:
            write(writer, quantizer, source)
    except (UnservableModel, ValueError) as error:
        cause = cannot_serve(settings.model_id, error).cause.replace("be served", "be quantised")
        raise SettingError("model_id", cause) from error
    result = quantizer.result()
    say(describe(result, source, output))
    print(output.absolute(), flush=True)
    return result


def write(writer: CheckpointWriter, quantizer: Quantizer, source: Path) -> None:
    """Write the quantised layers, then the plain tensors of the checkpoint, and the files beside them."""
    job, model, done = quantizer.job, quantizer.model, set[str]()
    linears = set[str]()
    for tensors in quantizer.layers(say):
        writer.add(tensors)
        done |= tensors.keys()
        linears |= {name.rpartition(".")[0] for name in tensors if name.endswith(("qweight", "weight_scale"))}
    rest = [key for key in model.tensors if key not in done and key.removesuffix(".weight") not in linears]
    for key in rest:
        done.add(key)
    for part in parts_of(rest, model):
        writer.add({key: model.tensors[key][...] for key in part})
    writer.publish(source, formats.config_of(job, quantizer.size, model.plan.head))


def parts_of(names: list[str], model: StagedModel) -> list[list[str]]:
    """Names of plain tensors, in parts that are in memory at a time."""
    parts: list[list[str]] = [[]]
    left_bytes = PART_BYTES
    for name in names:
        left_bytes -= num_bytes(model, name)
        if left_bytes < 0 and parts[-1]:
            parts.append([])
            left_bytes = PART_BYTES - num_bytes(model, name)
        parts[-1].append(name)
    return [part for part in parts if part]


def num_bytes(model: StagedModel, name: str) -> int:
    tensor = model.tensors[name]
    return int(torch.Size(tensor.get_shape()).numel()) * DTYPE_BYTES.get(tensor.get_dtype(), 1)


def bytes_after(model: StagedModel, job: QuantizeJob) -> int:
    """About how many bytes the quantised checkpoint has: its layers' matrices shrink."""
    layers = f"{model.plan.layers}."
    total = 0
    for name, tensor in model.tensors.items():
        own = num_bytes(model, name)
        if layers in name and len(tensor.get_shape()) > 1:
            own = int(torch.Size(tensor.get_shape()).numel()) * job.bits // 8
        total += own
    return total + total // 8


def describe(result: Result, source: Path, output: Path) -> str:
    sizes = [sum(file.stat().st_size for file in it.glob("*.safetensors")) / 2**20 for it in (source, output)]
    return (
        f"perplexity of {result.num_held_out} held-out tokens: {result.before:.3f} before, "
        f"{result.after:.3f} after; {sizes[0]:.0f} MiB before, {sizes[1]:.0f} MiB after"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
