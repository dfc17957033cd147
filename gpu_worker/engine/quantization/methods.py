"""Methods of quantisation that are read without a package of their own: by `quant_method` in a config."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.engine.quantization import floats, integers
from gpu_worker.engine.quantization.weight import Config, Fields, Stored, Weight

FLOATS8 = {"F8_E4M3", "F8_E5M2"}


@dataclass(frozen=True)
class Layout:
    """How a linear layer's weights lie in a file.

    Attributes:
        types: the first of `fields`, of one of these types, says that a layer is so.
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
"""Tensors about activations, which are not quantised so, and the KV cache (model/kv_scales.py)."""
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


def refusal_of(config: Config) -> str | None:
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
