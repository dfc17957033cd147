"""Weights: reads a checkpoint as transformers does. Quantised weights are computed to plain numbers, or read
by transformers' own quantizer. Weights that the config does not explain are refused.
"""

import copy
import json
import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from common import model_files
from common.settings.settings import SettingError, Settings
from common.settings.types import UNSERVED_METHODS
from gpu_worker.engine.attention import backend
from gpu_worker.engine.model.config import quantization_of
from gpu_worker.engine.quantization.checkpoint import (
    METHODS,
    file_slices,
    find_packed,
    method_of,
    read_tensors,
)

log = logging.getLogger(__name__)

MAX_NAMED = 3
"""Missing weights that an error names."""
TEXT_KEY_MAPPING = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
}
"""Names of the weights for text in checkpoints of models that see images, too (Gemma 3, Mistral 3, Llava,
SmolVLM) → names in the model for text.
"""


def make_dummy_model(
    kind: type[Any],
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    settings: Settings,
    seed: int = 0,
    attention: str = backend.NAME,
) -> Any:
    """A model of the class `kind` with random weights, to measure speed without a checkpoint; equal for equal
    seeds on devices of one kind. Raises SettingError if the checkpoint is quantised.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise SettingError("load_format", f"dummy makes plain weights, but {settings.model_id} is quantised")
    log.warning(
        "LOAD_FORMAT=dummy: the weights of %s are random, and its answers mean nothing", settings.model_id
    )
    torch.manual_seed(seed)
    verbosity = transformers_logging.get_verbosity()
    # else it would list each weight that no file has
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        options = {"dtype": dtype, "device_map": {"": device}, "attn_implementation": attention}
        return kind.from_pretrained(None, config=config, state_dict={}, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)


def read_weights(
    path: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    settings: Settings,
    needs_head: bool = True,
) -> Any:
    """The model on its device; on the CPU if some of its layers may be quantised. Raises SettingError if its
    weights would not be what the checkpoint means, and what transformers raises. With `needs_head` the
    weights of the head must be there.
    """
    method = quantization_method(config, settings.model_id)
    if settings.makes_weights:
        return make_dummy_model(type(meta_model(config, settings)), config, dtype, device, settings)
    check_files(path, settings.model_id, is_plain=method is None)
    whole = partial(AutoModelForCausalLM.from_pretrained, path, config=config)
    if method is None:
        model = load_pretrained(whole, settings, needs_head, dtype=dtype)
        if settings.quantize is None:
            model.to(device)
        return model
    if method in METHODS:
        plain = without_quantization(config)
        source = partial(type(meta_model(plain, settings)).from_pretrained, None, config=plain)
        tensors = read_tensors(path, quantization_of(config))
        return load_pretrained(source, settings, needs_head, dtype=dtype, state_dict=tensors)
    try:
        return load_pretrained(whole, settings, needs_head, dtype=dtype, device_map={"": device})
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SettingError("model_id", f"{settings.model_id} is quantised ({method}): {cause}") from error


def meta_model(config: Any, settings: Settings) -> Any:
    """The whole model on the meta device: shapes without numbers."""
    from_config: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return from_config(
            config, attn_implementation=backend.NAME, trust_remote_code=settings.trust_remote_code
        )


def load_pretrained(
    source: Callable[..., Any], settings: Settings, needs_head: bool = True, **options: Any
) -> Any:
    """Call `source`, a `from_pretrained` of transformers. Raises SettingError where weights are missing, of
    the head only if `needs_head`.
    """
    options |= {
        "attn_implementation": backend.NAME,
        "trust_remote_code": settings.trust_remote_code,
        "output_loading_info": True,
        "key_mapping": TEXT_KEY_MAPPING,
    }
    model, info = source(**options)
    check_missing(info, settings.model_id, () if needs_head else names_of_head(model))
    return model


def names_of_head(model: Any) -> list[str]:
    """Names of the parameters of a model's head."""
    own = {*map(id, model.get_output_embeddings().parameters())}
    return [name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in own]


def check_missing(info: dict[str, Any], model_id: str, unneeded: Collection[str] = ()) -> None:
    """Raises SettingError where transformers had no weights for a model, by its `loading_info`; those
    `unneeded` may be missing.
    """
    found = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    missing = sorted(found - {*unneeded})
    if missing:
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise SettingError(
            "model_id", f"{model_id} has no weights for {', '.join(missing[:MAX_NAMED])}{more}"
        )


def quantization_method(config: Any, model_id: str) -> str | None:
    """The method that the config names; None for plain weights. Raises SettingError for one that transformers
    would ignore.
    """
    values = quantization_of(config)
    if values is None:
        return None
    if method_of(values) in METHODS:
        return method_of(values)
    method = str(values.get("quant_method") or "method not named")
    if method in UNSERVED_METHODS:
        raise SettingError("model_id", f"{model_id} is quantised ({method}): {UNSERVED_METHODS[method]}")
    if method == "method not named" or not AutoHfQuantizer.supports_quant_method(values):  # type: ignore[no-untyped-call]
        known = ", ".join(sorted({*METHODS, *AUTO_QUANTIZER_MAPPING}))
        raise SettingError("model_id", f"{model_id} is quantised ({method}); these are known: {known}")
    return method


def without_quantization(config: Any) -> Any:
    """A copy of a config that describes plain weights."""
    plain = copy.deepcopy(config)
    if quantization_of(plain) is not None:
        del plain.quantization_config
    return plain


def check_files(path: Path, model_id: str, is_plain: bool) -> None:
    """Raises SettingError unless all .safetensors files are there and whole; pickled files are not read. It
    is raised, too, for weights of few bits if the config `is_plain`: transformers would read plain numbers.
    """
    files = model_files.weight_files(path)
    if not files:
        cause = f"has no whole set of .safetensors files in {path}, and nothing else is served"
        raise SettingError(
            "model_id", f"{model_id} {cause} (LOAD_FORMAT=dummy makes weights up, to measure speed)"
        )
    for file in files:
        if cause := fault_of(file):
            raise SettingError("model_id", f"{model_id} cannot be served: {file} {cause}")
    for packed in find_packed(dict(file_slices(path))) if is_plain else ():
        raise SettingError("model_id", f"{model_id} has {packed}, and its config.json says nothing of them")


def fault_of(file: Path) -> str:
    """What is wrong with a safetensors file; empty if nothing is. The file has the length of its header in 8
    little-endian bytes, the header in JSON, then the data of the tensors that the header names.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, size)))
        ends = (value["data_offsets"][1] for name, value in header.items() if name != "__metadata__")
        end = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return "is no safetensors file, or damaged: its header cannot be read"
    return "" if size == end else f"is damaged: it has {size} bytes, and {end} by its header"
