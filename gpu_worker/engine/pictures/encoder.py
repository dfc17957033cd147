"""Picture encoder: processes the pictures of rows in a thread of its own, encodes their units when the
schedule says so, and keeps the embeddings for later rows. Tower, projector and processor are transformers'
own.

Each picture is encoded once as long as its embeddings are kept: those used least recently go first. What rows
are still to read is never dropped.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.messages.plan import NewRow
from common.pictures import decoded
from gpu_worker.engine.batch.prefill import EncodedUnit, needed_pictures
from gpu_worker.engine.batch.row import RowSlice, StepPart
from gpu_worker.engine.batch.row_pictures import (
    PictureState,
    PlacedPicture,
    RowPictures,
    placeholders_of,
)
from gpu_worker.engine.pictures.families import PictureFamily, Tensors, embeddings_of
from gpu_worker.engine.side_threads import SideThreads

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


log = logging.getLogger(__name__)

Key = tuple[str, int]
"""Digest of a picture and number of its placeholders, which differs where a model sees a picture in several
ways.
"""
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
        self.thread = side_threads.make("pictures", NICENESS)

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
        return RowPictures(placed, has_axes, is_partial, self.tower.family.are_blocks)

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

    def prepare(self, rows: Any, slices: Sequence[RowSlice]) -> Sequence[RowSlice]:
        """Encode the units that are due; without the rows whose pictures have failed."""
        for unit in rows.encoding.take():
            self.encode(unit)
            rows.result.num_encoded += 1
        return [one for one in slices if not (one.row.pictures and one.row.pictures.failure)]

    def after(self, rows: Any, slices: Sequence[RowSlice]) -> None:
        if any(one.row.pictures for one in slices if not one.decodes):
            self.trim(needed_pictures(rows.rows.values()))

    def encode(self, unit: EncodedUnit) -> None:
        """Encode a unit. If that fails its rows end; of several ranks the worker ends, since the others
        compute the step.
        """
        state, number = unit
        try:
            self.fill(state, number)
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
            state.embeddings[number * count : (number + 1) * count] = tower.encode(state.tensors, number)

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
