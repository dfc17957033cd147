"""Checkpoint: a quantised model as GPTQ (version 1) writes it, which moves to its place when it is whole.
gpu_worker/engine/quantization/ reads it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from common import model_files
from common.quantize_job import QuantizeJob
from common.settings.settings import SettingError
from gpu_worker.engine.quantization.weight import Fields
from gpu_worker.engine.quantizing.rounding import Rounded

WORD_BITS = 32
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Ends of names of files that have weights."""


def pack_bits(quants: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [rows, n] → words int32 [rows, n * bits / 32], the first quants in the lowest bits"""
    places = quants.to(torch.int64).view(len(quants), -1, WORD_BITS // bits)
    words = (places << torch.arange(0, WORD_BITS, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def fields_of(rounded: Rounded, bits: int, dtype: torch.dtype) -> Fields:
    """A layer's tensors; version 1 stores zeros smaller by one."""
    inputs, groups = rounded.quants.shape[1], rounded.scales.shape[1]
    zeros = torch.full_like(rounded.scales.T, rounded.zero - 1)
    return {
        "qweight": pack_bits(rounded.quants, bits).T,
        "qzeros": pack_bits(zeros, bits),
        "scales": rounded.scales.T.to(dtype),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // groups),
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
    folder = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
        for file in source.iterdir():
            if file.is_file() and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        path = folder / model_files.CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}, indent=2))
        model_files.follow_umask(folder)
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        folder.rename(output)
    except OSError as error:
        cause = error.strerror or error
        raise SettingError("output", f"{output} cannot be written: {cause}") from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
