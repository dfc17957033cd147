"""The config of a model, and its weights. Rotary positions are stretched if the settings say so, and models
that cannot be served are refused. A checkpoint is read as transformers does. Quantised weights are computed
to plain numbers, or read by transformers' own quantizer. Weights that the config does not explain are
refused.
"""

import contextlib
import copy
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from common import model_files
from common.messages.request import CLASSIFY
from common.pooling import PoolingConfig
from common.settings.fields import UNSERVED_METHODS
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention import backend
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.quantization.checkpoint import METHODS, ROUNDINGS, file_slices, find_packed, method_of
from gpu_worker.protocol import UnservableModel, first_cause, refuse

TEXT_ONLY = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Model types of text parts → those of the models for text that are equal without images."""
LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}
"""Types of layers that may be served; the probe looks what they need."""
LEFT = {"codegen": "StarCoder2", "gptj": "GPT-NeoX", "xglm": "Qwen3 or Gemma 3"}
"""Model types that were served → models for the same that are."""


@dataclass(slots=True)
class ModelSource:
    """Where a model is read, and for what.

    Attributes:
        config: of its text part; None before it is read.
        dtype: in which it is computed.
        pooling: how it makes vectors; None if it generates.
    """

    path: Path
    config: Any
    dtype: torch.dtype
    device: torch.device
    settings: Settings
    communicator: Communicator
    pooling: PoolingConfig | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether its tokens see each other in both directions."""
        return self.pooling is not None and self.pooling.is_encoder


def read_config(path: Path, settings: Settings) -> Any:
    """Return the model's text config. Values outside the text part of a model for images and text are added.
    Raises SettingError.
    """
    model_id = settings.model_id
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        text = config.get_text_config()
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise cannot_serve(model_id, error) from error
    if cause := refusal_of(config, text):
        raise SettingError("model_id", f"{model_id} ({config.model_type}) {cause}")
    text = plain_text_config(text)
    if getattr(text, "head_dim", 0) is None:  # transformers computes `dynamic` positions with it
        text.head_dim = text.hidden_size // text.num_attention_heads
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    check_quantize(quantization_of(text), settings)
    if settings.rope_factor is not None:
        stretch_rope(text, settings.rope_scaling or "linear", settings.rope_factor)
    return text


def plain_text_config(text: Any) -> Any:
    """The config of the model for text if the text part differs from it only by positions for each axis of an
    image: in text these are all the same.
    """
    if text.model_type not in TEXT_ONLY:
        return text
    values = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    of_images = ("mrope_section", "mrope_interleaved")
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {name: value for name, value in rope.items() if name not in of_images}
    return AutoConfig.for_model(TEXT_ONLY[text.model_type], **values)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """How a checkpoint is quantised; None if it is not."""
    values = getattr(config, "quantization_config", None)
    return values if isinstance(values, dict) or values is None else dict(values.to_dict())


def quantizes(config: Any, settings: Settings) -> bool:
    """Whether plain weights are quantised at load."""
    return quantization_of(config) is None and settings.quantize in ROUNDINGS


def check_quantize(quantization: dict[str, Any] | None, settings: Settings) -> None:
    """Raises SettingError if QUANTIZE names another method than the checkpoint, or for plain weights one that
    is not made at load.
    """
    asked, own = settings.quantize, methods_of(quantization) if quantization else [*ROUNDINGS]
    made = f"{', '.join(ROUNDINGS)} are made of such at load"
    gptq = "`tokenfleet quantize MODEL OUT` makes such a checkpoint"
    cause = first_cause(
        (quantization, f"weights are loaded as the checkpoint has them ({own[-1]})"),
        (True, f"this checkpoint's weights are plain; {gptq if asked == 'gptq' else made}"),
    )
    if asked not in (None, *own):
        raise SettingError("quantize", f"{asked} is not served: {cause}")


def methods_of(quantization: dict[str, Any]) -> list[str]:
    """The names in QUANTIZE of a checkpoint's method; TGI's of bitsandbytes with 4 bits has their type."""
    method = str(quantization.get("quant_method")).replace("_", "-")
    four_bits = method == "bitsandbytes" and quantization.get("load_in_4bit")
    return [method, *([f"{method}-{quantization.get('bnb_4bit_quant_type', 'fp4')}"] if four_bits else [])]


def refusal_of(config: Any, text: Any) -> str:
    """Return why a model cannot be served, from its config and the text part of it; empty if it can."""
    types = {*(getattr(text, "layer_types", None) or ())}
    others = sorted(types - LAYER_TYPES)
    served = ", ".join(sorted(LAYER_TYPES))
    return first_cause(
        (
            text.model_type in LEFT,
            f"is not served any more; {LEFT.get(text.model_type)} is for the same, see docs/models.md",
        ),
        (
            not has_attention(text) and not types & {"linear_attention", "conv", "hybrid"},
            "has no attention heads, and no states that transformers' cache holds; only decoders with either "
            "are served",
        ),
        (
            getattr(text, "alibi", False),
            "uses ALiBi position biases, which are served for Bloom and MPT only",
        ),
        (
            getattr(getattr(text, "attn_config", None), "alibi", True) is False,
            "has no ALiBi position biases; transformers' code of it always adds them",
        ),
        (others, f"has layers of type {', '.join(others)}; only {served} are served"),
    )


def has_attention(config: Any) -> bool:
    try:
        return bool(
            getattr(config, "num_attention_heads", None) and getattr(config, "num_hidden_layers", None)
        )
    except RuntimeError:  # transformers', where the number differs between layers
        return True


def stretch_rope(config: Any, kind: str, factor: float) -> None:
    """Stretch the rotary positions of a config to sequences `factor` times as long: `linear`
    (arXiv:2306.15595) or `dynamic` NTK. Raises SettingError.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "default":
        raise SettingError("rope_factor", f"{config.model_type} has no plain rotary positions to stretch")
    config.rope_parameters = rope | {"rope_type": kind, "factor": factor}


def cannot_serve(model_id: str, error: Exception) -> SettingError:
    lines = (line.strip() for line in str(error).splitlines())
    cause = next(filter(None, lines), "") or type(error).__name__
    if "trust_remote_code" in str(error):
        cause = "it brings Python code along, which is run with TRUST_REMOTE_CODE only"
    return SettingError("model_id", f"{model_id} cannot be served: {cause}")


log = logging.getLogger(__name__)

MAX_NAMED = 3
"""Weights and layers that an error names."""
TEXT_KEY_MAPPING = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
}
"""Names of the weights for text in checkpoints of models that see images, too (Gemma 3, Mistral 3, Llava,
SmolVLM) → names in the model for text.
"""


def renamed(name: str, patterns: Mapping[str, str]) -> str:
    """The name of a tensor of a checkpoint, after all replacements of patterns."""
    for pattern, other in patterns.items():
        name = re.sub(pattern, other, name)
    return name


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
        "ignore_mismatched_sizes": True,  # `check_missing` refuses them
        "key_mapping": TEXT_KEY_MAPPING,
    }
    model, info = source(**options)
    # Pegasus' positions, which its checkpoints do not have
    computed = [f"{name}.weight" for name, part in model.named_modules() if hasattr(part, "create_weight")]
    check_missing(info, settings.model_id, computed if needs_head else names_of_head(model))
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
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    decodes = getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False)
    refuse(
        UnservableModel,
        (quantization_of(config), "is quantised; encoders are served with plain weights"),
        (decodes, "is used as a decoder"),
        (kind != "absolute", f"has positions of type {kind}; only absolute ones are served"),
    )
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
    shapes = {name: f" of shape {[*shape]}" for name, _, shape in info["mismatched_keys"]}
    found = dict.fromkeys(info["missing_keys"], "") | shapes
    missing = [name + found[name] for name in sorted(found.keys() - unneeded)]
    if missing:
        raise SettingError("model_id", f"{model_id} has no weights for {listed(missing)}")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


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
