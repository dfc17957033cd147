"""Weights: reads a checkpoint as transformers does. Quantised weights are computed to plain numbers, or read
by transformers' own quantizer. Weights that the config does not explain are refused.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from common import model_files
from common.messages.request import CLASSIFY
from common.settings.settings import SettingError, Settings
from common.settings.types import UNSERVED_METHODS
from gpu_worker.engine.attention import backend
from gpu_worker.engine.model.config import ModelSource, quantization_of
from gpu_worker.engine.quantization.checkpoint import (
    METHODS,
    file_slices,
    find_packed,
    method_of,
)
from gpu_worker.protocol import UnservableModel

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
    kind: type[Any], config: Any, source: ModelSource, seed: int = 0, attention: str = backend.NAME
) -> Any:
    """A model of the class `kind` with random weights, to measure speed without a checkpoint; equal for equal
    seeds on devices of one kind. Raises SettingError if the checkpoint is quantised.
    """
    model_id = source.settings.model_id
    if getattr(config, "quantization_config", None) is not None:
        raise SettingError("load_format", f"dummy makes plain weights, but {model_id} is quantised")
    log.warning("LOAD_FORMAT=dummy: the weights of %s are random, and its answers mean nothing", model_id)
    torch.manual_seed(seed)
    with quietly():  # else it would list each weight that no file has
        options = {"dtype": source.dtype, "device_map": {"": source.device}}
        options["attn_implementation"] = attention
        return kind.from_pretrained(None, config=config, state_dict={}, **options)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Within it transformers logs errors only."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


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
    the head, or of an encoder's pooler, only if `needs_head`.
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


def read_encoder(source: ModelSource) -> Any:
    """An encoder on the CPU; scores come from one with its classifier. Raises SettingError if it is not
    served, or where weights are missing.
    """
    settings, config = source.settings, source.config
    is_classifier = source.pooling is not None and source.pooling.kind == CLASSIFY
    if (size := source.communicator.world_size) > 1:
        cause = "an encoder is computed by one rank; NUM_WORKERS starts several of them"
        raise SettingError("num_shard", f"{size} ranks, but {cause}")
    if settings.quantize is not None:
        raise SettingError("quantize", f"{settings.quantize} is not served for encoders")
    if quantization_of(config) is not None:
        raise UnservableModel("is quantised; encoders are served with plain weights")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnservableModel("is used as a decoder")
    if (kind := getattr(config, "position_embedding_type", None)) not in ("absolute", None):
        raise UnservableModel(f"has positions of type {kind}; only absolute ones are served")
    model: Any = AutoModelForSequenceClassification if is_classifier else AutoModel
    if settings.makes_weights:
        torch.manual_seed(0)
        return model.from_config(config, attn_implementation=backend.NAME).to(source.dtype).eval()
    check_files(source.path, settings.model_id, is_plain=True)
    read = functools.partial(model.from_pretrained, source.path, config=config)
    return load_pretrained(read, settings, needs_head=is_classifier, dtype=source.dtype)


def names_of_head(model: Any) -> list[str]:
    """Names of the parameters of a model's head; of an encoder's pooler."""
    head = model.get_output_embeddings() or getattr(model, "pooler", None)
    own = {*map(id, head.parameters())} if head else set()
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
    """Raises SettingError unless all .safetensors files are there, and UnservableModel unless they are whole;
    pickled files are not read. SettingError is raised, too, for weights of few bits if the config `is_plain`:
    transformers would read plain numbers.
    """
    if not model_files.weight_files(path):
        cause = f"has no whole set of .safetensors files in {path}, and nothing else is served"
        raise SettingError(
            "model_id", f"{model_id} {cause} (LOAD_FORMAT=dummy makes weights up, to measure speed)"
        )
    slices = dict(file_slices(path))
    for packed in find_packed(slices) if is_plain else ():
        raise SettingError("model_id", f"{model_id} has {packed}, and its config.json says nothing of them")
