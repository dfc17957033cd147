"""Checkpoint of quantised weights: its tensors as a plain checkpoint would have them, each computed when it
is read. METHODS are those that need no package of their own.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from common import model_files
from gpu_worker.engine.quantization import floats, integers
from gpu_worker.engine.quantization.weight import Config, Fields, Stored, Weight, widen
from gpu_worker.protocol import UnservableModel

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


GPTQ = Layout({"I32"}, ("qweight", "scales", "qzeros"), ("g_idx",), integers.gptq_shape, integers.read_gptq)
AWQ = Layout({"I32"}, ("qweight", "scales", "qzeros"), (), integers.awq_shape, integers.read_awq)
FP8 = Layout(
    FLOATS8,
    ("weight",),
    ("weight_scale", "weight_scale_inv", "weight_zero_point"),
    floats.weight_shape,
    floats.read_fp8,
)
ZEROS = ("weight_zero_point", "weight_g_idx")
PACKED = Layout(
    {"I32"},
    ("weight_packed", "weight_scale", "weight_shape"),
    ZEROS,
    integers.packed_shape,
    integers.read_packed,
)
INT8 = Layout({"I8"}, ("weight", "weight_scale"), ZEROS, floats.weight_shape, integers.read_int8)
BNB8 = Layout({"I8"}, ("weight", "SCB"), (), floats.weight_shape, floats.read_bnb8)
NESTED = ("weight.nested_absmax", "weight.nested_quant_map", *floats.STATES)
BNB4 = Layout(
    {"U8"},
    ("weight", "weight.absmax", "weight.quant_map"),
    NESTED,
    floats.bnb4_shape,
    floats.read_bnb4,
)
METHODS: dict[str, tuple[Layout, ...]] = {
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "fp8": (FP8,),
    "fbgemm_fp8": (FP8,),
    "compressed-tensors": (PACKED, FP8, INT8),
    "bitsandbytes": (BNB8, BNB4),
}
IGNORED = (
    "input_scale",
    "activation_scale",
    "input_scale_ub",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "k_zero_point",
    "v_zero_point",
    "q_zero_point",
    "weight_format",
)
"""Tensors about activations, which stay unquantised, and about the KV cache (model/kv_budget.py)."""
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


def method_refusal_of(config: Config) -> str | None:
    """Why weights of one of METHODS cannot be read; None where they can."""
    method = method_of(config)
    if method == "gptq":
        return integers.refuse_gptq(config)
    if method == "awq":
        return integers.refuse_awq(config)
    return refuse_compressed(config) if method == "compressed-tensors" else None


def refuse_compressed(config: Config) -> str | None:
    groups = (config.get("config_groups") or {}).values()
    for form in (config.get("format"), *(group.get("format") for group in groups)):
        if form and form not in COMPRESSED:
            return f"its format is {form}; {', '.join(sorted(COMPRESSED))} are read"
    if len(sizes := floats.block_sizes(config)) > 1:
        return f"its blocks have several sizes: {', '.join(f'{rows}x{columns}' for rows, columns in sizes)}"
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse ({sparsity['format']})"
    return "its weights are rotated" if (config.get("transform_config") or {}).get("config_groups") else None


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
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UnservableModel(f"{layer} cannot be read: {cause}") from error


def read_tensors(path: Path, config: Config | None = None) -> dict[str, Any]:
    """Tensors by their names, none read yet: slices of files, and StoredWeight where the quantisation config
    `config` is of a known method. Raises UnservableModel where these are not as it says.
    """
    slices = dict(file_slices(path))
    if config is None:
        return slices
    if cause := method_refusal_of(config):
        raise UnservableModel(cause)
    weights = dict(find_weights(slices, config))
    used = {f"{layer}.{name}" for layer, weight in weights.items() for name in weight.stored}
    plain = {
        name: tensor
        for name, tensor in slices.items()
        if name not in used and name.rpartition(".")[2] not in IGNORED
    }
    for packed in find_packed(plain):
        raise UnservableModel(f"{packed} that its method does not have")
    return plain | {f"{layer}.weight": weight for layer, weight in weights.items()}


def file_slices(path: Path) -> Iterator[tuple[str, Any]]:
    for file in model_files.weight_files(path):
        opened: Any = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118
            yield name, opened.get_slice(name)


def find_weights(slices: Mapping[str, Any], config: Config) -> Iterator[tuple[str, StoredWeight]]:
    """Layers of one of the method's layouts. Raises UnservableModel where one of its tensors is missing."""
    for layout in METHODS[method_of(config)]:
        first = f".{layout.fields[0]}"
        for name, tensor in slices.items():
            if name.endswith(first) and tensor.get_dtype() in layout.types:
                layer = name.removesuffix(first)
                yield layer, StoredWeight(layer, layout, collect_fields(slices, layer, layout), config)


def collect_fields(slices: Mapping[str, Any], layer: str, layout: Layout) -> dict[str, Any]:
    names = {field: f"{layer}.{field}" for field in (*layout.fields, *layout.optional)}
    stored = {field: slices[name] for field, name in names.items() if name in slices}
    for field in layout.fields:
        if field not in stored:
            raise UnservableModel(f"there is {names[layout.fields[0]]}, but no {names[field]}")
    return stored


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
