"""Families whose model code computes attention itself: modules that make it use the interface of
transformers.
"""

import importlib
from typing import Any

import torch
from transformers import AttentionInterface

from gpu_worker.engine.attention.backend import NAME

MODULES = {
    "bloom": "gpu_worker.engine.model.families.bloom",
    "codegen": "gpu_worker.engine.model.families.gptj",
    "falcon": "gpu_worker.engine.model.families.falcon",
    "gptj": "gpu_worker.engine.model.families.gptj",
    "mpt": "gpu_worker.engine.model.families.mpt",
    "xglm": "gpu_worker.engine.model.families.xglm",
}
"""By model type. A module adds its classes to a table of transformers, or names in `PAGED` which class takes
the place of which.
"""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> torch.Tensor:
    """Attend by what the interface has under our name: query [1, heads, tokens, head_dim], key and value [1,
    kv_heads, tokens, head_dim] of the model's dtype → [1, tokens, heads, head_dim].
    """
    registered = AttentionInterface()[NAME]  # type: ignore[no-untyped-call]
    output: torch.Tensor = registered(module, query, key, value, attention_mask, **options)[0]
    return output


def register_family(model_type: str) -> None:
    """Make a family's attention known to transformers, before a model of it is built."""
    if model_type in MODULES:
        importlib.import_module(MODULES[model_type])


def page_attention(model: Any) -> None:
    """Give modules of a model the classes that use the interface."""
    name = MODULES.get(model.config.model_type)
    paged = getattr(importlib.import_module(name), "PAGED", {}) if name else {}
    for module in model.modules():
        module.__class__ = paged.get(type(module), type(module))
