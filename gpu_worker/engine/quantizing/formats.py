"""Formats: tensors and config of a quantised checkpoint, as GPTQ version 1, AutoAWQ (gemm) and
compressed-tensors (float-quantized) have them. gpu_worker/engine/quantization/ reads them.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from common.quantize_job import WHOLE_ROW, QuantizeJob
from gpu_worker.engine.quantization.integers import AWQ_PLACES
from gpu_worker.engine.quantization.weight import Fields
from gpu_worker.engine.quantizing.grid import Rounded

WORD_BITS = 32


def pack_bits(quants: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [rows, n] → words int32 [rows, n * bits / 32], the first quants in the lowest bits"""
    places = quants.to(torch.int64).view(len(quants), -1, WORD_BITS // bits)
    words = (places << torch.arange(0, WORD_BITS, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq_fields(rounded: Rounded, bits: int, dtype: torch.dtype) -> Fields:
    """A layer's tensors; version 1 stores zeros smaller by one."""
    inputs, groups = rounded.quants.shape[1], rounded.scales.shape[1]
    return {
        "qweight": pack_bits(rounded.quants, bits).T,
        "qzeros": pack_bits(rounded.zeros.T - 1, bits),
        "scales": rounded.scales.T.to(dtype),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // groups),
    }


def awq_fields(rounded: Rounded, dtype: torch.dtype) -> Fields:
    """A layer's tensors: eight outputs in a word, in AutoAWQ's order."""
    return {
        "qweight": pack_outputs(rounded.quants.T),
        "qzeros": pack_outputs(rounded.zeros.T),
        "scales": rounded.scales.T.to(dtype),
    }


def pack_outputs(table: torch.Tensor) -> torch.Tensor:
    """Integers from 0 to 15 [rows, outputs] → words int32 [rows, outputs / 8]"""
    in_words = torch.tensor(AWQ_PLACES).argsort()
    return pack_bits(table.reshape(len(table), -1, 8)[..., in_words].flatten(1), 4)


def config_of(job: QuantizeJob, group_size: int, head: str) -> Mapping[str, Any]:
    """`quantization_config` in config.json. `head`: name of the layer that stays plain."""
    made_by = f"tokenfleet {version('tokenfleet')}"
    if job.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": job.bits,
            "group_size": group_size,
            "desc_act": False,
            "static_groups": job.act_order,
            "sym": True,
            "true_sequential": False,
            "damp_percent": job.damping,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "meta": {"quantizer": [made_by]},
        }
    if job.method == "awq":
        return {
            "quant_method": "awq",
            "bits": job.bits,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [head],
        }
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = numbers | {"dynamic": False, "strategy": "channel"}
    activations = numbers | {"dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": [head],
        "kv_cache_scheme": None,
    }


def smallest_output(job: QuantizeJob) -> int:
    """What the number of a layer's outputs must be a multiple of: words of zeros are full."""
    return WORD_BITS // job.bits if job.method != "fp8" else 1


def divides(group_size: int, inputs: int) -> bool:
    return group_size == WHOLE_ROW or inputs % group_size == 0
