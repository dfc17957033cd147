"""Loads the vision tower of a model: the whole model of transformers without its language model, which is
loaded by itself as a model for text.
"""

import logging
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.model.rope import BY_LENGTH
from gpu_worker.engine.model.warmup import fastest_ms
from gpu_worker.engine.model.weights import (
    ModelSource,
    cannot_serve,
    check_missing,
    make_dummy_model,
    quantization_of,
    quietly,
    without_quantization,
)
from gpu_worker.engine.parallel.model_parallel import changed_class
from gpu_worker.engine.pictures.encoder import (
    FAMILIES,
    PICTURE_CACHE_BYTES,
    PictureEncoder,
    PictureFamily,
    VisionTower,
)
from gpu_worker.engine.quantization.checkpoint import read_tensors
from gpu_worker.engine.side_threads import SideThreads
from gpu_worker.protocol import first_cause

log = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
ATTENTION = "sdpa"
"""Of the tower: torch's own, since nothing of a picture is paged."""
NOT_MEASURED = 2.0**30
"""More than anything measured: a stage without a tower takes what the first one measures."""


def load_tower(source: ModelSource, is_first: bool) -> VisionTower | None:
    """The tower of a model that sees; None of others, and of those without a processor. A stage that is not
    the first has its processor only. Raises SettingError.
    """
    path, settings, device = source.path, source.settings, source.device
    config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    make_family = FAMILIES.get(config.model_type)
    if make_family is None or not any((path / name).exists() for name in PROCESSOR_FILES):
        return None
    family = make_family(config)
    if reason := blind_because(family, source):
        log.warning("%s is served for text only: %s", settings.model_id, reason)
        return None
    try:
        processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")  # type: ignore[no-untyped-call]
        model = read_tower(source, config, family) if is_first else None
    except (ValueError, OSError, ImportError) as error:
        raise cannot_serve(settings.model_id, error) from error
    placeholder_id, hidden_size = config.image_token_id, config.get_text_config().hidden_size
    hidden_size *= 1 + family.num_deep
    return VisionTower(model, processor, family, placeholder_id, hidden_size, device, source.dtype)


def blind_because(family: PictureFamily, source: ModelSource) -> str:
    """Why pictures cannot be shown to a model that sees; empty if they can."""
    settings, is_cuda = source.settings, source.device.type == "cuda"
    window = getattr(family.config.get_text_config(), "sliding_window", None)
    return first_cause(
        (is_cuda and settings.deterministic, "DETERMINISTIC on CUDA computes steps of token ids alone"),
        (
            is_cuda and family.block_tokens and find_spec("flashinfer"),
            "its pictures are seen as one, and FlashInfer's attention is causal",
        ),
        (
            window and family.block_tokens > window,
            "its pictures are seen as one, and are longer than its window",
        ),
        (
            family.mrope_axes and source.config.rope_parameters.get("rope_type") in BY_LENGTH,
            "its rotary frequencies depend on the length, and a picture has fewer positions than tokens",
        ),
    )


def make_encoder(loaded: LoadedModel, token_ms: float, side_threads: SideThreads) -> PictureEncoder | None:
    """The encoder of a model's pictures; None if it does not see. All ranks get the same measures."""
    tower, communicator = loaded.tower, loaded.communicator
    if tower is None:
        return None
    embedding_ms = NOT_MEASURED
    if tower.model:
        encode = tower.try_out()
        embedding_ms = fastest_ms(encode, tower.device) / len(encode())
    cost = min(communicator.exchange(embedding_ms / token_ms))
    waits = communicator.world_size > 1
    return PictureEncoder(tower, PICTURE_CACHE_BYTES, cost, waits, side_threads)


def read_tower(source: ModelSource, config: Any, family: PictureFamily) -> Any:
    """The whole model without its language model, on the device. Its weights are plain in quantised
    checkpoints, too. Raises SettingError where weights are missing.
    """
    plain = without_quantization(config)
    plain.tie_word_embeddings = False
    whole: Any = AutoModelForImageTextToText._model_mapping[type(config)]
    part = changed_class(whole, partial(remove_language_model, family=family))
    if source.settings.makes_weights:
        return make_dummy_model(part, plain, source, attention=ATTENTION)
    tensors = read_tensors(source.path, quantization_of(config))
    read = partial(part.from_pretrained, None, config=plain, state_dict=tensors, output_loading_info=True)
    with quietly():  # else it would list the weights of the language model
        model, info = read(dtype=source.dtype, attn_implementation=ATTENTION, ignore_mismatched_sizes=True)
    check_missing(info, source.settings.model_id)
    return model.to(source.device)


def remove_language_model(model: Any, family: PictureFamily) -> None:
    """Leave of a model what sees."""
    setattr(model.model, family.language_model, nn.Identity())
    model.lm_head = nn.Identity()
