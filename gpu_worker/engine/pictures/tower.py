"""Vision tower: transformers' own tower and projector of a model, and its own processor of pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.pictures import decoded
from gpu_worker.engine.pictures.families import PictureFamily, Tensors, embeddings_of

GREY_EDGE = 64
"""Height and width of the picture on which a tower is measured."""


@dataclass(frozen=True, slots=True)
class VisionTower:
    """The part of a model that sees. `tensors` are float32 and int64, [...] as its family has them.

    Attributes:
        model: the whole model without its language model; None in a stage that embeds nothing.
        processor: transformers' processor of pictures, which computes with Pillow.
        placeholder_id: the id of tokens whose embeddings pictures replace.
        hidden_size: of an embedding.
    """

    model: Any
    processor: Any
    family: PictureFamily
    placeholder_id: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype

    def process(self, data: bytes, num_tokens: int) -> Tensors:
        """Make the tower's inputs of the bytes of a picture with `num_tokens` placeholders. Any thread may
        call it. Raises PictureError, and what the processor raises.
        """
        return self.family.process(self.processor, decoded(data), num_tokens)

    @torch.inference_mode()
    def encode(self, tensors: Tensors, number: int) -> torch.Tensor:
        """Encode one unit of a picture → [embeddings, hidden] of the model's dtype."""
        unit = self.family.unit(tensors, number)
        inputs = {name: self.to_device(tensor) for name, tensor in unit.items()}
        return embeddings_of(self.model.model.get_image_features(**inputs)).to(self.dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """[...] of any dtype → the same on the device, numbers of pixels in the model's dtype."""
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        tensor = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return tensor.to(self.device, dtype, non_blocking=True)

    def try_out(self) -> Callable[[], torch.Tensor]:
        """What encodes one unit of a grey picture, to measure → as `encode`."""
        image = Image.fromarray(np.full((GREY_EDGE, GREY_EDGE, 3), 99, np.uint8))
        return partial(self.encode, self.family.process(self.processor, image, 0), 0)
