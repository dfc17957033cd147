"""Families whose pictures are served: what transformers' processor makes of a picture, in which units the
tower encodes that, and where the language model lies in the whole model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from PIL.Image import Image

from gpu_worker.engine.batch.row_pictures import PictureShape

Tensors = Mapping[str, torch.Tensor]
"""What a processor makes of one picture, by the names of the tower's arguments; shapes by the family."""
TENSORS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What towers take of what processors make."""


class PictureFamily:
    """How pictures of a family are encoded. `tensors` are float32 and int64, [...] as the family has them.

    Attributes:
        config: of the whole model.
        language_model: name of the part of `model.model` that is served without the tower.
        options: of the processor, where the family's own differ from the file's.
        mrope_axes: by half of a head's rotated numbers, which of a token's three positions turns it; empty
            where a token has one position.
        num_deep: the hidden states after so many first layers get embeddings of their own.
        are_blocks: the placeholders of a picture see each other, the later ones too.
    """

    language_model = "language_model"
    options: ClassVar[Mapping[str, Any]] = {}
    are_blocks = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.mrope_axes: Sequence[int] = ()
        self.num_deep = 0

    def process(self, processor: Any, image: Image, num_tokens: int) -> Tensors:
        """Make the tower's arguments of a picture that has `num_tokens` placeholders in its prompt."""
        made = processor(images=[image], return_tensors="pt", **self.options)
        return {name: made[name] for name in TENSORS if name in made}

    def shape(self, tensors: Tensors) -> PictureShape:
        """The shape of a picture."""
        raise NotImplementedError

    def unit(self, tensors: Tensors, number: int) -> Tensors:
        """Arguments of the tower for one unit."""
        return tensors


class Tiles(PictureFamily):
    """Pictures cut into tiles of one size, each of which has equally many embeddings: pixel_values float32
    [tiles, 3, height, width], after a batch of one if `dim` is 1.
    """

    dim = 0

    @property
    def tile_tokens(self) -> int:
        return num_patches(self.config)

    def shape(self, tensors: Tensors) -> PictureShape:
        num_tiles = tensors["pixel_values"].shape[self.dim]
        return PictureShape(num_tiles * self.tile_tokens, num_tiles)

    def unit(self, tensors: Tensors, number: int) -> Tensors:
        return {name: tensor.narrow(self.dim, number, 1) for name, tensor in tensors.items()}


class Idefics3(Tiles):
    """Idefics3 and SmolVLM."""

    language_model = "text_model"
    dim = 1

    @property
    def tile_tokens(self) -> int:
        return num_patches(self.config) // int(self.config.scale_factor) ** 2


class InternVL(Tiles):
    """InternVL 2.5 and later, in transformers' own format."""

    options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}

    @property
    def tile_tokens(self) -> int:
        return round(num_patches(self.config) * float(self.config.downsample_ratio) ** 2)


class Gemma3(Tiles):
    """Gemma 3: one tile of fixed size."""

    options: ClassVar[Mapping[str, Any]] = {"do_pan_and_scan": False}
    are_blocks = True

    @property
    def tile_tokens(self) -> int:
        return int(self.config.mm_tokens_per_image)


class LlavaOneVision(PictureFamily):
    """LLaVA-OneVision: pixel_values float32 [1, tiles, 3, height, width]. A picture that is alone is seen in
    tiles, too; of several each is seen whole only. They are told apart by their placeholders.
    """

    def process(self, processor: Any, image: Image, num_tokens: int) -> Tensors:
        is_alone = num_tokens != num_patches(self.config) + 1
        made = processor(images=[[image] if is_alone else [image, image]], return_tensors="pt")
        return {
            "pixel_values": made["pixel_values"][:1],
            "image_sizes": made["image_sizes"][:1],
            "batch_num_images": made["batch_num_images"],
        }

    def shape(self, tensors: Tensors) -> PictureShape:
        """By transformers' own packing of empty embeddings."""
        from transformers.models.llava_onevision import modeling_llava_onevision

        kind: Any = modeling_llava_onevision.LlavaOnevisionModel
        num_tiles = tensors["pixel_values"].shape[1] if tensors["batch_num_images"] == 1 else 1
        packed, _ = kind.pack_image_features(
            SimpleNamespace(config=self.config),
            [torch.empty(num_tiles, num_patches(self.config), 1)],
            tensors["image_sizes"],
            image_newline=torch.empty(1),
            vision_aspect_ratio=self.config.vision_aspect_ratio,
        )
        return PictureShape(len(packed[0]))

    def unit(self, tensors: Tensors, number: int) -> Tensors:
        if tensors["batch_num_images"] == 1:
            return tensors
        return {**tensors, "pixel_values": tensors["pixel_values"][:, :1]}


class Qwen2VL(PictureFamily):
    """Qwen2-VL and 2.5-VL: patches float32 [patches, numbers], and the grid that they fill."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rope = config.get_text_config().rope_parameters
        self.mrope_axes = sectioned_axes(rope["mrope_section"])

    def shape(self, tensors: Tensors) -> PictureShape:
        merge = self.config.vision_config.spatial_merge_size
        _, height, width = (tensors["image_grid_thw"][0] // torch.tensor([1, merge, merge])).tolist()
        return PictureShape(height * width, grid=(height, width))


class Qwen3VL(Qwen2VL):
    """Qwen3-VL, whose axes take turns among the numbers of a head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        sections = config.get_text_config().rope_parameters["mrope_section"]
        self.mrope_axes = interleaved_axes(sections)
        self.num_deep = len(config.vision_config.deepstack_visual_indexes)


def sectioned_axes(sections: Sequence[int]) -> list[int]:
    """Axes of neighbouring numbers: the first for time, then height, then width."""
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def interleaved_axes(sections: Sequence[int]) -> list[int]:
    """Axes in turns as long as height and width have numbers left; all others are of time."""
    return [
        turn if place < 3 * sections[turn] else 0 for place in range(sum(sections)) for turn in [place % 3]
    ]


def num_patches(config: Any) -> int:
    """Patches of a tile."""
    vision = config.vision_config
    sides = [side_of(vision.image_size, axis) // side_of(vision.patch_size, axis) for axis in (0, 1)]
    return math.prod(sides)


def side_of(size: Any, axis: int) -> int:
    return int(size[axis] if isinstance(size, list | tuple) else size)


FAMILIES: dict[str, Callable[[Any], PictureFamily]] = {
    "gemma3": Gemma3,
    "idefics3": Idefics3,
    "internvl": InternVL,
    "llava_onevision": LlavaOneVision,
    "qwen2_5_vl": Qwen2VL,
    "qwen2_vl": Qwen2VL,
    "qwen3_vl": Qwen3VL,
    "smolvlm": Idefics3,
}
"""By the `model_type` of the whole model; each takes its config."""


def embeddings_of(output: Any) -> torch.Tensor:
    """What a tower returns for one picture → [embeddings, hidden] of its dtype; those for the first layers
    beside those for the input.
    """
    deep = getattr(output, "deepstack_features", None) or ()
    return torch.cat([flattened(part) for part in (output.pooler_output, *deep)], 1)


def flattened(found: Any) -> torch.Tensor:
    """One tensor of embeddings, or several: [..., hidden] of any dtype → [embeddings, hidden]"""
    parts = found if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
