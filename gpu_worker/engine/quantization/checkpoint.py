"""Weights of few bits, of a quantised checkpoint or made of plain ones at load.

A checkpoint's tensors are as a plain checkpoint would have them, each computed when it
is read. The layouts: integers in groups (GPTQ, AWQ and compressed-tensors), 8-bit floats with scales, and
those of bitsandbytes; METHODS need no package of their own. At load weights become 8-bit floats, or the
numbers of the packages whose methods these are: bitsandbytes' (LLM.int8, NF4 and FP4) and EETQ's.

Functions named `shape` return [outputs, inputs] of a layer, whose tensors are `stored` in the file.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common import model_files
from gpu_worker.engine.cuda.linear import fits_fp8_kernel, round_rows
from gpu_worker.engine.quantization.blocks import LARGEST_BLOCK, SMALLEST_BLOCK, Blocks
from gpu_worker.protocol import UnservableModel, first_cause, first_line

Config = Mapping[str, Any]
"""What config.json says of the quantisation."""
Fields = Mapping[str, torch.Tensor]
"""A layer's tensors, by their names in it."""
Stored = Mapping[str, Any]
"""The same in a safetensors file, not read yet."""


Weight = Blocks | torch.Tensor
"""In blocks, or float32 [outputs, inputs]."""


def widen(weight: Weight) -> torch.Tensor:
    """float32 [outputs, inputs]"""
    return weight.widen(torch.float32) if isinstance(weight, Blocks) else weight.float()


def scale_floats(values: torch.Tensor, scales: torch.Tensor, part: tuple[int, int] | None = None) -> Weight:
    """8-bit floats [outputs, inputs] with scales of any float dtype: one, one for each output, or [parts
    along the outputs, parts along the inputs], then with the `part`'s size where it is known, else they are
    equal; in blocks where each row has whole ones. Raises ValueError.
    """
    scales, inputs = scales.float(), values.shape[1]
    table = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    if part is None or table.numel() == 1 or table.shape == (len(values), 1):
        part = equal_part(values, table)
    counts = [-(-size // width) for size, width in zip(values.shape, part, strict=True)]
    if list(table.shape) != counts:
        raise ValueError(f"scales {list(scales.shape)} do not fit weights {list(values.shape)}")
    table = table.repeat_interleave(part[0], 0)[: len(values)]
    size = inputs if table.shape[1] == 1 else math.gcd(part[1], LARGEST_BLOCK)
    if table.shape[1] == 1 or (inputs % part[1] == 0 and size >= SMALLEST_BLOCK):
        return Blocks(values, table.repeat_interleave(min(inputs, part[1]) // size, 1), None)
    return values.float() * table.repeat_interleave(part[1], 1)[:, :inputs]


def equal_part(values: torch.Tensor, table: torch.Tensor) -> tuple[int, int]:
    """How many outputs and inputs share a scale, where 8-bit floats [outputs, inputs] have scales [parts
    along the outputs, parts along the inputs] of any dtype. Raises ValueError.
    """
    (outputs, inputs), (rows, columns) = values.shape, table.shape
    if outputs % rows or inputs % columns:
        scales = f"scales {list(table.shape)} of blocks whose size the config does not name"
        raise ValueError(f"{scales} do not divide weights {list(values.shape)}")
    return outputs // rows, inputs // columns


def scale_integers(
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    size: int,
    groups: torch.Tensor | None = None,
) -> Blocks | torch.Tensor:
    """Weights (quant - zero) * scale, of each group of inputs its own; in blocks where a group has `size`
    inputs and the kernels' sums are exact.

    quants uint8, then with zeros, or int8 [outputs, inputs]; scales of any float dtype and zeros, integers,
    [outputs, groups]; `groups`, integers [inputs]: of each input. Raises ValueError.
    """
    outputs, inputs = quants.shape
    in_turn = torch.arange(inputs) // size
    expected = [outputs, -(-inputs // size) if groups is None else scales.shape[-1]]
    if list(scales.shape) != expected:
        raise ValueError(f"scales {list(scales.shape)} do not fit weights {[outputs, inputs]}")
    groups = in_turn if groups is None else groups.long()
    width = math.gcd(size, LARGEST_BLOCK, inputs)
    exact = zeros is None or any(
        torch.equal(scales.to(kind).to(scales.dtype), scales) for kind in (torch.half, torch.bfloat16)
    )
    order = None if torch.equal(groups, in_turn) else groups.argsort(stable=True)
    even = order is None or torch.equal(groups[order], in_turn)
    if not even or width < SMALLEST_BLOCK or not exact:
        centred = quants.float() if zeros is None else quants.float() - zeros.float()[:, groups]
        return centred * scales.float()[:, groups]
    if quants.dtype == torch.uint8 and quants.max() > 15 and zeros is not None:
        quants, zeros = (quants.short() - 128).to(torch.int8), zeros.short() - 128
    columns = in_turn[::width]
    quants = quants if order is None else quants[:, order]
    offsets = None if zeros is None else (-zeros.float() * scales.float())[:, columns]
    return Blocks(quants, scales.float()[:, columns], offsets, order=order).halved()


STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


# --- 8-bit floats: weight [outputs, inputs], and weight_scale or weight_scale_inv, which both multiply


def weight_shape(stored: Stored, config: Config) -> list[int]:
    return list(stored["weight"].get_shape())


def read_fp8(fields: Fields, config: Config) -> Weight:
    """Raises ValueError where the layer has no scales, or others than these mean."""
    scales = fields.get("weight_scale_inv", fields.get("weight_scale"))
    zeros = fields.get("weight_zero_point")
    if scales is None or (zeros is not None and zeros.float().any()):
        lack = "without weight_scale or weight_scale_inv" if scales is None else "with zero points"
        raise ValueError(f"8-bit floats {lack}")
    return scale_floats(fields["weight"], scales, next(iter(block_sizes(config)), None))


def block_sizes(config: Config) -> list[tuple[int, int]]:
    """Outputs and inputs of blocks that have a scale each, in order. compressed-tensors has them in each of
    its groups of layers, older versions as `128x128`.
    """
    groups = (config.get("config_groups") or {}).values()
    sizes = [(group.get("weights") or {}).get("block_structure") for group in groups]
    named = filter(None, (config.get("weight_block_size"), *sizes))
    return sorted({block_size(size) for size in named})


def block_size(named: str | Sequence[int]) -> tuple[int, int]:
    outputs, inputs = named.split("x") if isinstance(named, str) else named
    return int(outputs), int(inputs)


# --- bitsandbytes, 8 bits: weight int8 [outputs, inputs], SCB [outputs]; 127 stands for SCB


def read_bnb8(fields: Fields, config: Config) -> Weight:
    return scale_integers(
        fields["weight"], fields["SCB"].float()[:, None] / 127, None, fields["weight"].shape[1]
    )


# --- bitsandbytes, 4 bits: weight uint8 [quants / 2, 1], the first quant of a byte in its upper half;
# quant_map [16]; absmax [blocks], or of 8 bits with nested_quant_map [256] and nested_absmax;
# quant_state, JSON


def bnb4_shape(stored: Stored, config: Config) -> list[int]:
    states = {name: tensor[...] for name, tensor in stored.items() if name in STATES}
    return list(quant_state(states)["shape"])


def quant_state(fields: Fields) -> dict[str, Any]:
    """Raises ValueError where the layer has none."""
    text = next((bytes(fields[name].tolist()) for name in STATES if name in fields), None)
    if text is None:
        raise ValueError(f"4-bit floats without {' or '.join(STATES)}")
    state: dict[str, Any] = json.loads(text)
    return state


def read_bnb4(fields: Fields, config: Config) -> Weight:
    state, packed = quant_state(fields), fields["weight"].flatten()
    quants = torch.stack([packed >> 4, packed & 15], 1).flatten()
    factors = fields["weight.absmax"]
    if factors.dtype == torch.uint8:
        factors = fields["weight.nested_quant_map"].float()[factors.long()]
        factors = scaled(factors, fields["weight.nested_absmax"].float(), state["nested_blocksize"])
        factors = factors + state["nested_offset"]
    codes, shape, size = fields["weight.quant_map"].float(), state["shape"], state["blocksize"]
    quants = quants[: torch.Size(shape).numel()]
    width = math.gcd(size, LARGEST_BLOCK)
    if len(shape) == 2 and shape[1] % size == 0 and width >= SMALLEST_BLOCK:
        scales = factors.float().view(shape[0], -1).repeat_interleave(size // width, 1)
        return Blocks(quants.view(shape), scales, None, codes)
    return scaled(codes[quants.long()], factors.float(), size).view(shape)


def scaled(numbers: torch.Tensor, factors: torch.Tensor, size: int) -> torch.Tensor:
    """float32 [numbers], each times the factor of its block of `size` numbers; factors float32 [blocks]"""
    return numbers * factors.repeat_interleave(size)[: len(numbers)]


AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of eight outputs in turn, the place of each in its word."""


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 or bytes [rows, n], each row a string of bits from the lowest of the first one on → quants
    of 2, 3, 4 or 8 bits, uint8 [rows, bits of a row / bits]
    """
    octets = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        quants: torch.Tensor = octets[..., None] >> shifts & 2**bits - 1
        return quants.flatten(-2)
    threes = octets.view(len(octets), -1, 3).int()  # 24 bits are eight quants of 3
    joined = threes[..., 0] | threes[..., 1] << 8 | threes[..., 2] << 16
    shifts = torch.arange(0, 24, bits, dtype=torch.int32)
    return (joined[..., None] >> shifts).bitwise_and(2**bits - 1).to(torch.uint8).flatten(-2)


# --- GPTQ: qweight [inputs * bits / 32, outputs], scales [groups, outputs], g_idx [inputs],
# qzeros [groups, outputs * bits / 32]


def gptq_shape(stored: Stored, config: Config) -> list[int]:
    words, outputs = stored["qweight"].get_shape()
    inputs = stored["g_idx"].get_shape()[0] if "g_idx" in stored else words * 32 // config["bits"]
    return [outputs, inputs]


def read_gptq(fields: Fields, config: Config) -> Weight:
    """Version 1 stores zeros smaller by one. A layer may have another number of bits than the config."""
    qweight, groups = fields["qweight"], fields.get("g_idx")
    bits = config["bits"] if groups is None else len(qweight) * 32 // len(groups)
    quants = unpack_bits(qweight.T, bits)
    zeros = unpack_bits(fields["qzeros"], bits).T.short()
    if config.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1
    return scale_integers(quants, fields["scales"].T, zeros, group_size(config, quants.shape[1]), groups)


def refuse_gptq(config: Config) -> str:
    form, bits = config.get("checkpoint_format") or "gptq", config.get("bits")
    packed = form if form != "gptq" else "marlin" if config.get("is_marlin_format") else ""
    return first_cause(
        (packed not in ("", "gptq_v2"), f"its weights are packed as {packed}; gptq and gptq_v2 are read"),
        (bits not in (2, 3, 4, 8), f"it has {bits} bits; 2, 3, 4 and 8 are read"),
    )


# --- AWQ: qweight [inputs, outputs / 8], scales [groups, outputs], qzeros [groups, outputs / 8]


def awq_shape(stored: Stored, config: Config) -> list[int]:
    inputs, words = stored["qweight"].get_shape()
    return [words * 8, inputs]


def read_awq(fields: Fields, config: Config) -> Weight:
    quants, zeros = (in_order(unpack_bits(fields[name], 4)).T for name in ("qweight", "qzeros"))
    return scale_integers(quants.contiguous(), fields["scales"].T, zeros, group_size(config, quants.shape[1]))


def in_order(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, outputs], in the order of their words"""
    return packed.view(len(packed), -1, 8)[..., AWQ_PLACES].flatten(1)


def refuse_awq(config: Config) -> str:
    form = str(config.get("version") or config.get("format") or "gemm").lower()
    bits = config.get("bits", config.get("w_bit"))
    return first_cause(
        (form != "gemm", f"its weights are packed as {form}; gemm is read"),
        (bits != 4, f"it has {bits} bits; 4 are read"),
    )


def group_size(config: Config, inputs: int) -> int:
    size = int(config.get("group_size", config.get("q_group_size", -1)))
    return size if size > 0 else inputs


# --- compressed-tensors: weight_packed [outputs, inputs * bits / 32], or weight [outputs, inputs] of int8;
# weight_scale [outputs or 1, groups], weight_zero_point as these or packed along the outputs


def read_packed(fields: Fields, config: Config) -> Weight:
    outputs, inputs = fields["weight_shape"].tolist()
    packed, zeros = fields["weight_packed"], fields.get("weight_zero_point")
    bits = next((bits for bits in (4, 8, 2) if packed.shape[1] == -(-inputs * bits // 32)), None)
    if bits is None:
        raise ValueError(f"weight_packed {list(packed.shape)} does not fit weight_shape {[outputs, inputs]}")
    quants, middle = unpack_bits(packed, bits)[:, :inputs].contiguous(), 2 ** (bits - 1)
    if zeros is None:
        zeros = torch.full_like(fields["weight_scale"], middle, dtype=torch.short)
    elif zeros.dtype == torch.int32:
        zeros = unpack_bits(zeros.T, bits).T[:outputs].short()
    else:
        zeros = zeros.short() + middle
    return scale_channels(quants, fields, zeros)


def read_int8(fields: Fields, config: Config) -> Weight:
    zeros = fields.get("weight_zero_point")
    return scale_channels(fields["weight"], fields, zeros if zeros is not None and zeros.any() else None)


def scale_channels(quants: torch.Tensor, fields: Fields, zeros: torch.Tensor | None) -> Weight:
    """quants uint8 or int8 [outputs, inputs], zeros, integers, as weight_scale. Raises ValueError."""
    outputs, inputs = quants.shape
    groups = fields.get("weight_g_idx")
    if groups is not None and (groups < 0).any():
        groups = None
    scales = for_each_output(fields["weight_scale"], outputs)
    if inputs % scales.shape[1]:
        raise ValueError(f"{scales.shape[1]} groups do not divide {inputs} inputs")
    zeros = None if zeros is None else for_each_output(zeros, outputs)
    return scale_integers(quants, scales, zeros, inputs // scales.shape[1], groups)


def for_each_output(table: torch.Tensor, outputs: int) -> torch.Tensor:
    """[outputs, groups] of any dtype, also from one number, or one for each output"""
    return (table if table.dim() == 2 else table.reshape(-1, 1)).expand(outputs, -1)


# --- blocks beside the weights of a converted GGUF file (gguf.py)


def blocks_shape(stored: Stored, config: Config) -> list[int]:
    outputs, places = stored["quants"].get_shape()
    return [outputs, places * (2 if stored["quants"].get_dtype() == "U8" else 1)]


def read_blocks(fields: Fields, config: Config) -> Weight:
    quants = fields["quants"]
    quants = unpack_bits(quants, 4) if quants.dtype == torch.uint8 else quants
    return Blocks(quants, fields["scales"], fields.get("offsets"))


FLOATS8 = {"F8_E4M3", "F8_E5M2"}
PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}
WEIGHTS = ("weight", "qweight", "weight_packed")
FEW_BITS = ("F4", "F6_", "F8_", "I8", "U8")
"""Prefixes of types whose numbers need scales."""
MASKS = ("bias", "masked_bias", "mask", "causal_mask", "attn_mask")
"""Tables of zeros and ones in older checkpoints."""
SCALES = ("_scale", "_scale_inv", "_scales")


@dataclass(frozen=True)
class Layout:
    """How a linear layer's weights lie in a file.

    Attributes:
        types: a layer has this layout if the first of its `fields` has one of these types.
        fields: names of the layer's tensors.
        optional: names of tensors that it may have, too.
    """

    types: set[str]
    fields: tuple[str, ...]
    optional: tuple[str, ...]
    shape: Callable[[Stored, Config], list[int]]
    read: Callable[[Fields, Config], Weight]


GPTQ = Layout({"I32"}, ("qweight", "scales", "qzeros"), ("g_idx",), gptq_shape, read_gptq)
AWQ = Layout({"I32"}, ("qweight", "scales", "qzeros"), (), awq_shape, read_awq)
FP8 = Layout(
    FLOATS8,
    ("weight",),
    ("weight_scale", "weight_scale_inv", "weight_zero_point"),
    weight_shape,
    read_fp8,
)
ZEROS = ("weight_zero_point", "weight_g_idx")
PACKED = Layout(
    {"I32"},
    ("weight_packed", "weight_scale", "weight_shape"),
    ZEROS,
    lambda stored, _: list(stored["weight_shape"][...].tolist()),
    read_packed,
)
INT8 = Layout({"I8"}, ("weight", "weight_scale"), ZEROS, weight_shape, read_int8)
BNB8 = Layout({"I8"}, ("weight", "SCB"), (), weight_shape, read_bnb8)
NESTED = ("weight.nested_absmax", "weight.nested_quant_map", *STATES)
BNB4 = Layout(
    {"U8"},
    ("weight", "weight.absmax", "weight.quant_map"),
    NESTED,
    bnb4_shape,
    read_bnb4,
)
BLOCKS = Layout({"U8", "I8"}, ("quants", "scales"), ("offsets",), blocks_shape, read_blocks)
BLOCKS_FOLDER = "blocks"
"""In the directory of a converted model; checkpoints are not looked for in that folder."""
CONVERTED = {"quant_method": "gguf"}
"""Of the files in that folder."""
METHODS: dict[str, tuple[Layout, ...]] = {
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "fp8": (FP8,),
    "fbgemm_fp8": (FP8,),
    "compressed-tensors": (PACKED, FP8, INT8),
    "bitsandbytes": (BNB8, BNB4),
    "gguf": (BLOCKS,),
}
IGNORED = re.compile(r"(input|activation|output|[kvq])_(scale|scale_ub|zero_point)|weight_format")
"""Tensors about activations, which stay unquantised, and about the KV cache (model/warmup.py)."""
COMPRESSED = {
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
}


def method_of(config: Config) -> str:
    return str(config.get("quant_method") or "").replace("_", "-").replace("fbgemm-fp8", "fbgemm_fp8")


def refuse_compressed(config: Config) -> str:
    groups, sizes = (config.get("config_groups") or {}).values(), block_sizes(config)
    forms = {config.get("format"), *(group.get("format") for group in groups)} - COMPRESSED - {None, ""}
    named = ", ".join(f"{rows}x{columns}" for rows, columns in sizes)
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    rotated = (config.get("transform_config") or {}).get("config_groups")
    return first_cause(
        (forms, f"its format is {', '.join(map(str, forms))}; {', '.join(sorted(COMPRESSED))} are read"),
        (len(sizes) > 1, f"its blocks have several sizes: {named}"),
        (sparsity != "dense", f"its weights are sparse ({sparsity})"),
        (rotated, "its weights are rotated"),
    )


REFUSALS = {"gptq": refuse_gptq, "awq": refuse_awq, "compressed-tensors": refuse_compressed}


@dataclass
class StoredWeight:
    """The weights of one linear layer. Stands for a tensor of a safetensors file, as transformers takes it.

    Attributes:
        layer: its name in the checkpoint.
        stored: the layer's tensors in the file, by their names in it.
    """

    layer: str
    layout: Layout
    stored: Stored
    config: Config

    def read(self) -> Weight:
        """Raises UnservableModel where the layer's tensors do not belong together."""
        with naming_layer(self.layer):
            fields = {name: tensor[...] for name, tensor in self.stored.items()}
            return self.layout.read(fields, self.config)

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        """[outputs, inputs]. Raises UnservableModel."""
        with naming_layer(self.layer):
            return self.layout.shape(self.stored, self.config)

    def __getitem__(self, part: Any) -> torch.Tensor:
        """float32 [outputs, inputs], or this part of it. Raises UnservableModel."""
        return widen(self.read())[part]


@contextlib.contextmanager
def naming_layer(layer: str) -> Iterator[None]:
    """Turn errors of tensors that do not fit each other into UnservableModel, which names the layer."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise UnservableModel(f"{layer} cannot be read: {first_line(error)}") from error


def read_tensors(path: Path, config: Config | None = None) -> dict[str, Any]:
    """Tensors by their names, none read yet: slices of files, and StoredWeight where the quantisation config
    `config` is of a known method. Raises UnservableModel where these are not as it says.
    """
    slices = dict(file_slices(path))
    if config is None or method_of(config) not in METHODS:
        return slices
    if cause := REFUSALS.get(method_of(config), lambda _: "")(config):
        raise UnservableModel(cause)
    weights = dict(find_weights(slices, config))
    used = {f"{layer}.{name}" for layer, weight in weights.items() for name in weight.stored}
    plain = {
        name: tensor
        for name, tensor in slices.items()
        if name not in used and not IGNORED.fullmatch(name.rpartition(".")[2])
    }
    for packed in find_packed(plain):
        raise UnservableModel(f"{packed} that its method does not have")
    return plain | {f"{layer}.weight": weight for layer, weight in weights.items()}


def file_slices(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of the files of a model by their names, none read yet. Raises UnservableModel."""
    for file in model_files.weight_files(path):
        try:
            opened: Any = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise UnservableModel(f"{file} is damaged, or no safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118
            yield name, opened.get_slice(name)


def find_weights(slices: Mapping[str, Any], config: Config) -> Iterator[tuple[str, StoredWeight]]:
    """Layers of one of the method's layouts. Raises UnservableModel where one of its tensors is missing."""
    for layout in METHODS[method_of(config)]:
        first = f".{layout.fields[0]}"
        for name, tensor in slices.items():
            if name.endswith(first) and tensor.get_dtype() in layout.types:
                layer = name.removesuffix(first)
                names = {field: f"{layer}.{field}" for field in (*layout.fields, *layout.optional)}
                stored = {field: slices[name] for field, name in names.items() if name in slices}
                for missing in {*layout.fields} - {*stored}:
                    raise UnservableModel(f"there is {name}, but no {names[missing]}")
                yield layer, StoredWeight(layer, layout, stored, config)


def find_packed(slices: Mapping[str, Any]) -> Iterator[str]:
    """Type and name of tensors whose values mean nothing without others. Experts that are one tensor have a
    name of their own, and their scales one that begins with it.
    """
    for name, tensor in slices.items():
        kind, last = str(tensor.get_dtype()), name.rpartition(".")[2]
        scaled = any(f"{name}{scale}" in slices for scale in SCALES)
        few = kind.startswith(FEW_BITS) and last not in MASKS
        if kind not in PLAIN_DTYPES and (last in WEIGHTS or scaled or few):
            yield f"weights of type {kind} ({name})"


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
