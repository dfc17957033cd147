"""A whole tiny model that sees: random weights, a tokenizer of bytes, a chat template and a processor."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.pictures import decoded
from tests.support.engine import tiny_models
from tests.support.engine.pictures.models import FAMILIES
from tests.support.pictures.processors import CLASSES, TOKENS, make_processor, tokenizer_for

MODELS = {"idefics3": "Idefics3", "qwen2_vl": "Qwen2-VL"}
"""Model types → names in `FAMILIES`."""


class SeeingReference:
    """A model in transformers, with its processor."""

    def __init__(self, folder: Path, family: str) -> None:
        """Make the model, and write it to a folder."""
        chosen = FAMILIES[MODELS[family]]
        assert CLASSES[family][1] == chosen.processor
        placeholder = tokenizer_for(family).convert_tokens_to_ids(TOKENS[family]["image_token"])
        text = chosen.sizes["text_config"] | {"max_position_embeddings": 1024}
        sizes = {**chosen.sizes, "image_token_id": placeholder, "text_config": text}
        self.model = tiny_models.save(folder, chosen.name, sizes)
        self.processor = make_processor(family, folder, **chosen.options)

    def ids(self, text: str, contents: Sequence[bytes], count: int) -> list[int]:
        """Greedy new ids after a prompt with these pictures."""
        images = [[decoded(content) for content in contents]]
        inputs: Any = self.processor(images=images, text=[text], return_tensors="pt")
        output = copy.deepcopy(self.model).generate(
            **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        new: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return new
