"""Quantising of plain weights at load: 8-bit floats, and with the numbers of the packages whose methods these
are bitsandbytes' (LLM.int8, NF4 and FP4) and EETQ's.
"""

from collections.abc import Callable, Mapping

import torch

from gpu_worker.engine.cuda.linear import fits_fp8_kernel, round_rows
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.checkpoint import Weight, scale_integers, scaled

FP8_AT_LOAD = "fp8"
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Numbers that are equally likely among normal ones (arXiv:2305.14314)."""
FP4 = (
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
    *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
)
"""Floats of 4 bits without their sign, which is the highest bit."""
BLOCK_4_BITS = 64
"""Weights that share a scale, of those that follow each other in memory."""


def round_bnb8(weight: torch.Tensor) -> Weight:
    """LLM.int8: weights of any float dtype [outputs, inputs]; 127 stands for the largest of an output."""
    halves = weight.half().float()
    largest = nonzero(halves.abs().amax(1, keepdim=True))
    quants = (halves * (127 / largest)).round().to(torch.int8)
    return scale_integers(quants, largest / 127, None, weight.shape[1])


def round_eetq(weight: torch.Tensor) -> Weight:
    """EETQ: weights of any float dtype [outputs, inputs]; 128 stands for the largest of an output, and scales
    have 16 bits.
    """
    scales = nonzero(weight.float().abs().amax(1, keepdim=True) / 128)
    quants = (weight.float() / scales).round().clamp(-128, 127).to(torch.int8)
    return scale_integers(quants, scales.half(), None, weight.shape[1])


def round_fp8(weight: torch.Tensor) -> Weight:
    """Weights of any float dtype [outputs, inputs], with a scale for each output; plain ones, which no device
    multiplies as 8-bit floats, stay as they are.
    """
    return Blocks(*round_rows(weight), None) if fits_fp8_kernel(weight) else weight


def round_nf4(weight: torch.Tensor) -> Weight:
    """weights of any float dtype [outputs, inputs]"""
    codes = torch.tensor(NF4, device=weight.device)
    return round_blocks(weight, codes, lambda numbers: nearest(numbers, codes))


def round_fp4(weight: torch.Tensor) -> Weight:
    """weights of any float dtype [outputs, inputs]; halfway between two numbers the smaller one is taken"""
    positive = torch.tensor(FP4, device=weight.device)
    codes = torch.cat([positive, -positive])
    return round_blocks(weight, codes, lambda numbers: nearest(numbers.abs(), positive) + 8 * (numbers < 0))


def round_blocks(
    weight: torch.Tensor, codes: torch.Tensor, find: Callable[[torch.Tensor], torch.Tensor]
) -> Weight:
    """Weights of any float dtype [outputs, inputs] by codes, float32 [16]; in blocks where each row has whole
    ones. `find` returns the places of numbers from -1 to 1 among the codes.
    """
    outputs, inputs = weight.shape
    numbers = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % BLOCK_4_BITS))
    parts = numbers.view(-1, BLOCK_4_BITS)
    largest = nonzero(parts.abs().amax(1))
    quants = find(parts / largest[:, None]).to(torch.uint8)
    if inputs % BLOCK_4_BITS == 0:
        return Blocks(quants.view(outputs, inputs), largest.view(outputs, -1), None, codes)
    widened = scaled(codes[quants.flatten().long()], largest, BLOCK_4_BITS)
    return widened[: weight.numel()].view(outputs, inputs)


def nearest(numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The places int64 [...] of the codes, float32 [codes], next to numbers float32 [...]."""
    in_order, places = codes.sort()
    return places[torch.bucketize(numbers, (in_order[1:] + in_order[:-1]) / 2)]


def nonzero(largest: torch.Tensor) -> torch.Tensor:
    """float32 [...], 1 in place of 0: such weights are all 0."""
    return torch.where(largest > 0, largest, 1.0)


ROUNDINGS: Mapping[str, Callable[[torch.Tensor], Weight]] = {
    FP8_AT_LOAD: round_fp8,
    "bitsandbytes": round_bnb8,
    "bitsandbytes-nf4": round_nf4,
    "bitsandbytes-fp4": round_fp4,
    "eetq": round_eetq,
}
"""By the value of QUANTIZE."""
