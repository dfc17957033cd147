"""Tiny models that see, with random weights and transformers' own processors; prompts with pictures, what
`generate` answers to them, and engines that must answer the same.
"""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from gpu_worker.engine.batch.prefill import needed_pictures
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import StepResult
from tests.support.engine import tiny_engine, tiny_models
from tests.support.engine.batch_player import Player, player

EYES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QWEN_EYES = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
NO_CHANGES: Mapping[str, Any] = {}
PLACEHOLDER = 499
BEFORE_TILE = 3
"""A token between the tiles of a picture, where the processor puts text there."""
SMALL: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
IDEFICS: dict[str, Any] = {
    "text_config": tiny_models.LLAMA | {"model_type": "llama"},
    "vision_config": EYES,
    "image_token_id": PLACEHOLDER,
    "scale_factor": 2,
    "tie_word_embeddings": False,
}


QWEN_TEXT = tiny_models.LLAMA | tiny_models.rope("default", mrope_section=[2, 3, 3])
QWEN_IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 498, "vision_start_token_id": 496} | {
    "vision_end_token_id": 497,
    "tie_word_embeddings": False,
}
QWEN_PATCHES: dict[str, Any] = {
    "patch_size": 8,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
}
SQUARE = {"height": 32, "width": 32}


@dataclass(frozen=True, slots=True)
class SeeingFamily:
    """A family of tiny models.

    Attributes:
        name: of its classes in transformers.
        processor: name of the class of its processor.
        tile_tokens: placeholders of a tile; 0 where a picture is not cut into tiles.
        calls: options of a call of the processor.
        between: a token stands between the tiles of a picture.
    """

    name: str
    sizes: Mapping[str, Any]
    processor: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tile_tokens: int = 0
    calls: Mapping[str, Any] = field(default_factory=dict)
    between: bool = False


FAMILIES = {
    "SmolVLM": SeeingFamily("SmolVLM", IDEFICS, "SmolVLMImageProcessorPil", SMALL, 4, between=True),
    "Idefics3": SeeingFamily("Idefics3", IDEFICS, "Idefics3ImageProcessorPil", SMALL, 4, between=True),
    "Gemma3": SeeingFamily(
        "Gemma3",
        {
            "text_config": tiny_models.LLAMA | tiny_models.WIDE | tiny_models.MIXED | tiny_models.SPREAD,
            "vision_config": EYES | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_index": PLACEHOLDER,
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": False,
        },
        "Gemma3ImageProcessorPil",
        {"size": SQUARE},
        16,
    ),
    "InternVL": SeeingFamily(
        "InternVL",
        {
            "text_config": tiny_models.LLAMA | {"model_type": "qwen2"},
            "vision_config": EYES | {"image_size": [32, 32], "patch_size": [8, 8]},
            "image_token_id": PLACEHOLDER,
            "tie_word_embeddings": False,
        },
        "GotOcr2ImageProcessorPil",
        {"size": SQUARE, "max_patches": 4},
        4,
        {"crop_to_patches": True},
    ),
    "LLaVA-OneVision": SeeingFamily(
        "LlavaOnevision",
        {
            "text_config": tiny_models.LLAMA | {"model_type": "qwen2"},
            "vision_config": EYES | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_id": PLACEHOLDER,
            "video_token_id": 498,
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]],
            "vision_aspect_ratio": "anyres_max_9",
            "tie_word_embeddings": False,
        },
        "LlavaOnevisionImageProcessorPil",
        {"size": SQUARE, "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]]},
    ),
    "Qwen2-VL": SeeingFamily(
        "Qwen2VL",
        {
            "text_config": QWEN_TEXT,
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "num_heads": 2,
                "hidden_size": 64,
                "patch_size": 8,
            },
        }
        | QWEN_IDS,
        "Qwen2VLImageProcessorPil",
        QWEN_PATCHES,
    ),
    "Qwen2.5-VL": SeeingFamily(
        "Qwen2_5_VL",
        {
            "text_config": QWEN_TEXT,
            "vision_config": QWEN_EYES
            | {"depth": 2, "patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]},
        }
        | QWEN_IDS,
        "Qwen2VLImageProcessorPil",
        QWEN_PATCHES,
    ),
    "Qwen3-VL": SeeingFamily(
        "Qwen3VL",
        {
            "text_config": tiny_models.LLAMA
            | tiny_models.WIDE
            | tiny_models.rope("default", mrope_section=[4, 6, 6], mrope_interleaved=True),
            "vision_config": QWEN_EYES | {"depth": 3, "patch_size": 8, "deepstack_visual_indexes": [0, 1]},
        }
        | QWEN_IDS,
        "Qwen2VLImageProcessorPil",
        QWEN_PATCHES,
    ),
}


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """A prompt's ids, its pictures as a row has them, and what the processor makes of them."""

    ids: list[int]
    pictures: list[tuple[int, int, str, bytes]]
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SeeingModel:
    folder: Path
    family: SeeingFamily
    model: Any
    processor: Any

    def prompt(self, *parts: Sequence[int] | bytes) -> SeenPrompt:
        """A prompt of token ids and pictures."""
        ids: list[int] = []
        pictures = []
        data = [part for part in parts if isinstance(part, bytes)]
        inputs = self.process(data) if data else {}
        for part in parts:
            if isinstance(part, bytes):
                own = self.placeholders(part, len(data))
                pictures.append((len(ids), len(own), hashlib.sha256(part).hexdigest(), part))
                ids += own
            else:
                ids += part
        return SeenPrompt(ids, pictures, inputs)

    def process(self, data: Sequence[bytes]) -> dict[str, Any]:
        """What the processor makes of the pictures of one prompt."""
        images = [[opened(one) for one in data]]
        return dict(self.processor(images=images, return_tensors="pt", **self.family.calls))

    def placeholders(self, data: bytes, num_pictures: int) -> list[int]:
        """What stands in a prompt for a picture, one of several."""
        made, family = self.process([data]), self.family
        if family.tile_tokens:
            tiles: int = made["pixel_values"].shape[1 if family.between else 0]
            tile = [PLACEHOLDER] * family.tile_tokens + [BEFORE_TILE] * family.between
            return [token for _ in range(tiles) for token in tile]
        if "image_grid_thw" in made:
            return [PLACEHOLDER] * int(made["image_grid_thw"].prod() // 4)
        made["batch_num_images"] = torch.tensor([num_pictures])
        made["pixel_values"] = made["pixel_values"][:, : None if num_pictures == 1 else 1]
        with torch.inference_mode():
            seen = self.model.model.get_image_features(**made).pooler_output
        return [PLACEHOLDER] * sum(map(len, seen))

    def generate(self, prompt: SeenPrompt, count: int) -> list[int]:
        """Greedy new ids of transformers."""
        inputs = self.inputs_of(prompt, torch.tensor([prompt.ids]))
        return tiny_models.generate(self.model, prompt.ids, count, **inputs)

    def forward(self, prompt: SeenPrompt, ids: torch.Tensor) -> Any:
        """What transformers' forward returns for a prompt and more ids: int64 [1, tokens]."""
        return self.model(input_ids=ids, **self.inputs_of(prompt, ids))

    def inputs_of(self, prompt: SeenPrompt, ids: torch.Tensor) -> dict[str, Any]:
        """What the model takes beside ids int64 [1, tokens]."""
        counts = ("num_patches", "num_crops")
        inputs = {name: value for name, value in prompt.inputs.items() if name not in counts}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        if self.family.name == "Gemma3":
            inputs["token_type_ids"] = (ids == PLACEHOLDER).int()
        return inputs


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def picture(seed: int, height: int = 40, width: int = 60) -> bytes:
    """A picture of large coloured squares."""
    colours = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def save(folder: Path, name: str, text: Mapping[str, Any] = NO_CHANGES) -> SeeingModel:
    """Write a random model of a family, with its processor; `text` changes its text config."""
    family = FAMILIES[name]
    sizes = dict(family.sizes) | {"text_config": family.sizes["text_config"] | text}
    if "out_hidden_size" in family.sizes["vision_config"] and "hidden_size" in text:
        sizes["vision_config"] = sizes["vision_config"] | {"out_hidden_size": text["hidden_size"]}
    model = tiny_models.save(folder, family.name, sizes)
    processor = getattr(transformers, family.processor)(**family.options)
    processor.save_pretrained(folder)
    return SeeingModel(folder, family, model, processor)


class SettledEngine:
    """An engine whose steps wait for the pictures of its rows, with the interface that Player needs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.apply: Callable[..., None] = engine.apply
        self.rows = engine.rows
        self.block_size = engine.block_size
        self.ready = engine.ready

    def step(self) -> StepResult | None:
        while (result := self.engine.step()) is None and (waited := self.unprocessed()):
            wait(waited, timeout=10)
        return result

    def unprocessed(self) -> list[Any]:
        return [one.shape for one in needed_pictures(self.rows.rows.values()) if not one.is_ready]


# --- an engine ----------------------------------------------------------------------------------------------

NEW_TOKENS = 12
SETTINGS = tiny_engine.SETTINGS | {"block_size": 16}


class Seeing:
    """A tiny model, an engine of it, prompts and their answers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = save(folder, name)
        self.engine: Any = self.start()
        self.prompts = prompts_of(self.model)
        self.answers = {row: self.model.generate(prompt, NEW_TOKENS) for row, prompt in self.prompts.items()}

    def start(self, **settings: Any) -> SettledEngine:
        """Another engine of the model."""
        return SettledEngine(tiny_engine.engine_of(self.model.folder, **SETTINGS | settings))

    def player(self, prefill_tokens: int = 1000) -> Player:
        return player(self.engine, prefill_tokens)

    def play(self, rows: dict[int, SeenPrompt], prefill_tokens: int = 1000) -> dict[int, list[int]]:
        ids = {row: prompt.ids for row, prompt in rows.items()}
        return tiny_engine.play(
            self.engine, ids, prefill_tokens, new_tokens=NEW_TOKENS, params=self.pictures(rows)
        )

    def check(self) -> None:
        """All prompts have their answers, however they are played."""
        ids = {row: prompt.ids for row, prompt in self.prompts.items()}
        tiny_engine.check_ids(self.engine, self.answers, ids, params=self.pictures(self.prompts))

    def pictures(self, rows: dict[int, SeenPrompt]) -> dict[int, dict[str, Any]]:
        return {row: {"pictures": prompt.pictures} for row, prompt in rows.items()}

    def pictures_after(self, prompt: SeenPrompt, num_cached: int) -> list[tuple[int, int, str, bytes]]:
        """As an agent gives them."""
        after = [one for one in prompt.pictures if one[0] + one[1] > num_cached]
        return prompt.pictures if self.engine.ready.all_pictures else after


def prompts_of(model: SeeingModel) -> dict[int, SeenPrompt]:
    return {
        0: model.prompt([5, 6, 7], picture(1), [8, 9, 10, 11, *range(60, 95)]),
        1: model.prompt([*range(20, 50)]),
        2: model.prompt([12] * 9, picture(2, 64, 30), [13, 14], picture(3, 33, 33), [15]),
        3: model.prompt([4, 3], picture(1), [16, 17, 18]),
    }
