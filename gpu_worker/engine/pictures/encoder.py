"""Pictures: the families that are served (what transformers' processor makes of a picture, in which units the
tower encodes that, and where the language model lies in the whole model), and the encoder. It processes the
pictures of rows in a thread of its own, encodes their units when the schedule says so, and keeps the
embeddings for later rows. Tower, projector and processor are transformers' own.

Each picture is encoded once as long as its embeddings are kept: those used least recently go first. What rows
are still to read is never dropped.
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from common.messages.plan import NewRow
from common.pictures import decoded
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.prefill import needed_pictures
from gpu_worker.engine.batch.row import RowSlice, StepPart, StepSlices
from gpu_worker.engine.batch.row_pictures import (
    PictureShape,
    PictureState,
    PlacedPicture,
    RowPictures,
    placeholders_of,
)
from gpu_worker.engine.side_threads import SideThread, SideThreads

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
        tile_dim: the dimension of pixel_values whose entries are tiles, each of which is a unit with equally
            many embeddings; None: the picture is one unit.
        mrope_axes: by half of a head's rotated numbers, which of a token's three positions turns it; empty
            where a token has one position.
        num_deep: the hidden states after so many first layers get embeddings of their own.
        block_tokens: placeholders of a picture, where these see each other, the later ones too; else 0.
    """

    language_model = "language_model"
    options: ClassVar[Mapping[str, Any]] = {}
    tile_dim: int | None = None

    def __init__(self, config: Any) -> None:
        self.config = config
        self.mrope_axes: Sequence[int] = ()
        self.num_deep = 0
        self.block_tokens = 0

    def process(self, processor: Any, image: Image.Image, num_tokens: int) -> Tensors:
        """Make the tower's arguments of a picture that has `num_tokens` placeholders in its prompt."""
        made = processor(images=[image], return_tensors="pt", **self.options)
        return {name: made[name] for name in TENSORS if name in made}

    def shape(self, tensors: Tensors) -> PictureShape:
        """The shape of a picture."""
        return PictureShape(1 if self.tile_dim is None else tensors["pixel_values"].shape[self.tile_dim])

    def unit(self, tensors: Tensors, number: int) -> Tensors:
        """Arguments of the tower for one unit."""
        if self.tile_dim is None:
            return tensors
        return {name: tensor.narrow(self.tile_dim, number, 1) for name, tensor in tensors.items()}


class Idefics3(PictureFamily):
    """Idefics3 and SmolVLM."""

    language_model = "text_model"
    tile_dim = 1


class InternVL(PictureFamily):
    """InternVL 2.5 and later, in transformers' own format."""

    options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}
    tile_dim = 0


class Gemma3(PictureFamily):
    """Gemma 3: one tile of fixed size."""

    options: ClassVar[Mapping[str, Any]] = {"do_pan_and_scan": False}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.block_tokens = int(config.mm_tokens_per_image)


class LlavaOneVision(PictureFamily):
    """LLaVA-OneVision: pixel_values float32 [1, tiles, 3, height, width]. A picture that is alone is seen in
    tiles, too; of several each is seen whole only. They are told apart by their placeholders.
    """

    def process(self, processor: Any, image: Image.Image, num_tokens: int) -> Tensors:
        is_alone = num_tokens != num_patches(self.config) + 1
        made = processor(images=[[image] if is_alone else [image, image]], return_tensors="pt")
        return {
            "pixel_values": made["pixel_values"][:1],
            "image_sizes": made["image_sizes"][:1],
            "batch_num_images": made["batch_num_images"],
        }

    def unit(self, tensors: Tensors, number: int) -> Tensors:
        if tensors["batch_num_images"] == 1:
            return tensors
        return {**tensors, "pixel_values": tensors["pixel_values"][:, :1]}


class Qwen2VL(PictureFamily):
    """Qwen2-VL and 2.5-VL: patches float32 [patches, numbers], and the grid that they fill."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rope = config.get_text_config().rope_parameters
        sections = rope["mrope_section"]  # time, then height, then width
        self.mrope_axes = [axis for axis, count in enumerate(sections) for _ in range(count)]

    def shape(self, tensors: Tensors) -> PictureShape:
        merge = self.config.vision_config.spatial_merge_size
        _, height, width = (tensors["image_grid_thw"][0] // torch.tensor([1, merge, merge])).tolist()
        return PictureShape(grid=(height, width))


class Qwen3VL(Qwen2VL):
    """Qwen3-VL, whose axes take turns among the numbers of a head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        sections = config.get_text_config().rope_parameters["mrope_section"]
        places = range(sum(sections))  # axes take turns while height and width have numbers left; then time
        self.mrope_axes = [at % 3 if at < 3 * sections[at % 3] else 0 for at in places]
        self.num_deep = len(config.vision_config.deepstack_visual_indexes)


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
        inputs = {
            name: to_device(tensor, self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in unit.items()
        }
        return embeddings_of(self.model.model.get_image_features(**inputs)).to(self.dtype)

    def try_out(self) -> Callable[[], torch.Tensor]:
        """What encodes one unit of a grey picture, to measure → as `encode`."""
        image = Image.fromarray(np.full((GREY_EDGE, GREY_EDGE, 3), 99, np.uint8))
        return partial(self.encode, self.family.process(self.processor, image, 0), 0)


log = logging.getLogger(__name__)

Key = tuple[str, int]
"""Digest of a picture and number of its placeholders, which differs where a model sees a picture in several
ways.
"""
PICTURE_CACHE_BYTES = 256 * 2**20
"""Encoded pictures that an engine keeps for further requests."""
MAX_PROCESSED_BYTES = 2**28
"""Pixels that wait for their encoding: beyond it no further picture is processed ahead."""
NICENESS = 10
"""Of the thread that processes pictures: it gives way to the steps of other rows."""


class PictureEncoder(StepPart):
    """The pictures of one engine.

    Attributes:
        waits: as in PictureState.
        token_cost: how many prompt tokens take as long as one embedding.
        held: by key, those used least recently first.
        waiting: pictures that are not processed yet.
    """

    failure = "picture"

    def __init__(
        self,
        tower: VisionTower,
        cache_bytes: int,
        token_cost: float,
        waits: bool,
        side_threads: SideThreads,
    ) -> None:
        self.tower = tower
        self.cache_bytes = cache_bytes
        self.token_cost = token_cost
        self.waits = waits
        self.held: OrderedDict[Key, PictureState] = OrderedDict()
        self.waiting: deque[PictureState] = deque()
        self.thread = SideThread(side_threads, "pictures", NICENESS)

    def start(self, start: NewRow) -> RowPictures | None:
        """The pictures of a row that starts, None if it has none; those that are not held begin to be
        processed.
        """
        ids, placeholder_id = np.frombuffer(start.ids, "<i4"), self.tower.placeholder_id
        has_axes = bool(self.tower.family.mrope_axes)
        if not any(start.contents) and not (has_axes and placeholder_id in ids):
            return None
        placed = [
            PlacedPicture(self.state_of((one.digest, len(places)), data), places)
            for one, data in zip(start.request.pictures, start.contents, strict=True)
            if data
            for places in [placeholders_of(ids, one.start, one.num_tokens, placeholder_id)]
        ]
        prompt = ids[: len(ids) - start.base]
        known = sum(len(one.places) for one in placed)
        is_partial = has_axes and known != np.count_nonzero(prompt == placeholder_id)
        return RowPictures(placed, has_axes, is_partial, self.tower.family.block_tokens > 0)

    def sleep(self) -> None:
        self.held.clear()
        self.waiting.clear()

    def state_of(self, key: Key, data: bytes) -> PictureState:
        state = self.held.get(key)
        if state is None or (state.shape.done() and state.failure):
            state = self.held[key] = PictureState(key[1], Future(), self.waits, self.token_cost, data=data)
            self.waiting.append(state)
        self.held.move_to_end(key)
        return state

    def before(self, rows: Any) -> None:
        """Process what waits, as far as pixels have room."""
        if not self.waiting:
            return
        self.trim(needed_pictures(rows.rows.values()))
        held = {*self.held.values()}
        pixels = sum(tensor.nbytes for state in held for tensor in state.tensors.values())
        while self.waiting and (self.waits or pixels < MAX_PROCESSED_BYTES):
            if (state := self.waiting.popleft()) in held:
                pixels += MAX_PROCESSED_BYTES // 2  # two at a time, until it is known what they take
                self.thread.submit(self.process, state)

    def process(self, state: PictureState) -> None:
        """In the thread: process a picture."""
        try:
            state.tensors = self.tower.process(state.data, state.num_tokens)
            state.shape.set_result(self.tower.family.shape(state.tensors))
        except Exception as error:  # codecs raise what they like
            state.shape.set_exception(error)
        state.data = b""

    def prepare(self, rows: Any, slices: StepSlices) -> Sequence[RowSlice]:
        """Encode the units that are due; without the rows whose pictures have failed."""
        for state in self.held.values():
            while state.num_encoded < state.num_scheduled:
                self.encode(state)
                rows.result.num_encoded += 1
        failed = {one.row for one in slices.others if one.row.pictures and one.row.pictures.failure}
        return [one for one in slices if one.row not in failed] if failed else slices

    def after(self, rows: Any, slices: StepSlices) -> None:
        if any(one.row.pictures for one in slices.others if not one.decodes):
            self.trim(needed_pictures(rows.rows.values()))

    def encode(self, state: PictureState) -> None:
        """Encode the next unit. If that fails its rows end; of several ranks the worker ends, since the
        others compute the step.
        """
        state.num_encoded += 1
        try:
            self.fill(state, state.num_encoded - 1)
        except Exception as error:
            if self.waits:
                raise
            log.warning("a picture cannot be encoded", exc_info=error)
            state.has_failed = True

    @torch.inference_mode()
    def fill(self, state: PictureState, number: int) -> None:
        """Compute the embeddings of a unit, in a stage that embeds tokens."""
        tower, count = self.tower, state.unit_tokens
        if state.embeddings is None:
            size = state.num_tokens, tower.hidden_size
            state.embeddings = torch.empty(size, dtype=tower.dtype, device=tower.device)
        if tower.model is not None and not state.has_failed:
            found = tower.encode(state.tensors, number)
            if len(found) != count:
                raise ValueError(f"{len(found)} embeddings for {count} placeholders")
            state.embeddings[number * count : (number + 1) * count] = found

    def trim(self, needed: Collection[PictureState]) -> None:
        """Drop pictures that no row needs: those that are not encoded, and the least recently used beyond
        `cache_bytes`. Nothing may be launched that is still to read what it drops.
        """
        kept_bytes = sum(state.embedding_bytes for state in self.held.values())
        for key, state in list(self.held.items()):
            if state.is_scheduled:
                state.tensors = {}
            if state in needed:
                continue
            if kept_bytes > self.cache_bytes or not state.is_scheduled:
                kept_bytes -= state.embedding_bytes
                state.embeddings = None
                del self.held[key]
