"""LOAD_FORMAT=dummy: random weights of the shapes in a config, to measure how fast a model is of which no
weights are at hand.
"""

import logging
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention import backend

log = logging.getLogger(__name__)


def make_dummy_model(
    kind: type[Any], config: Any, dtype: torch.dtype, device: torch.device, settings: Settings, seed: int = 0
) -> Any:
    """A model of the class `kind` as it is before its training, made on its device; the same for the same
    seed on devices of one kind.

    Raises:
        SettingError: the checkpoint is quantised.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise SettingError("load_format", f"dummy makes plain weights, but {settings.model_id} is quantised")
    log.warning(
        "LOAD_FORMAT=dummy: the weights of %s are random, and its answers mean nothing", settings.model_id
    )
    torch.manual_seed(seed)
    verbosity = transformers_logging.get_verbosity()
    # it would list each weight that no file has
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        options = {"dtype": dtype, "device_map": {"": device}, "attn_implementation": backend.NAME}
        return kind.from_pretrained(None, config=config, state_dict={}, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)
