"""The pictures of a row: which of its tokens are placeholders of pictures, and how far these are encoded. No
tensors are computed here.

A picture is encoded in units (tiles, or the whole picture). Its embeddings, in the order of its placeholders,
take the place of those of the placeholders' ids. A row is computed up to the first placeholder whose unit is
not encoded yet.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gpu_worker.engine.batch.step_result import Int32, Int64


class PictureShape(NamedTuple):
    """What is known of a picture once it is processed.

    Attributes:
        num_units: it is encoded in so many parts, each with equally many embeddings.
        grid: (height, width) in placeholders where these have positions of their own; else (0, 0).
    """

    num_units: int = 1
    grid: tuple[int, int] = (0, 0)


@dataclass(slots=True, eq=False)
class PictureState:
    """One picture, for all rows that have it.

    Attributes:
        num_tokens: its placeholders in the prompt.
        shape: of the picture, which is processed in another thread.
        waits: rows do not go on without it, since several ranks take the same steps.
        token_cost: how many prompt tokens take as long as one embedding.
        num_scheduled: units that are encoded, or will be before the step that is being made.
        num_encoded: units that are.
        has_failed: its encoding has.
        data: its bytes, until it is processed.
        tensors: what the tower takes, by name, from then on until it is encoded.
        embeddings: [num_tokens, hidden] on the device, filled unit by unit; None before the first one.
    """

    num_tokens: int
    shape: Future[PictureShape]
    waits: bool = False
    token_cost: float = 1.0
    num_scheduled: int = 0
    num_encoded: int = 0
    has_failed: bool = False
    data: bytes = b""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    embeddings: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether its units can be scheduled, or whoever schedules them waits for its shape."""
        return self.waits or self.shape.done()

    @property
    def failure(self) -> str:
        """Why it cannot be shown to the model; empty if it can, as far as is known."""
        if self.has_failed:
            return "its encoding failed"
        if not self.is_ready:
            return ""
        if error := self.shape.exception():
            return f"{type(error).__name__}: {error}"
        num_units, grid = self.shape.result()
        fits = self.num_tokens % num_units == 0 and math.prod(grid) in (0, self.num_tokens)
        return "" if fits else f"{num_units} parts, grid {grid}, for {self.num_tokens} placeholders"

    @property
    def num_units(self) -> int:
        return self.shape.result().num_units

    @property
    def unit_tokens(self) -> int:
        """Embeddings of a unit."""
        return self.num_tokens // self.num_units

    @property
    def unit_cost(self) -> int:
        """How many prompt tokens take as long as one unit."""
        return max(1, round(self.unit_tokens * self.token_cost))

    @property
    def embedding_bytes(self) -> int:
        return 0 if self.embeddings is None else int(self.embeddings.nbytes)

    @property
    def num_embedded(self) -> int:
        return self.num_scheduled * self.unit_tokens if self.num_scheduled else 0

    @property
    def is_scheduled(self) -> bool:
        return bool(self.num_scheduled) and self.num_scheduled == self.num_units


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a row.

    Attributes:
        places: int64 [num_tokens]; positions of its placeholders.
    """

    picture: PictureState
    places: Int64

    @property
    def end(self) -> int:
        return int(self.places[-1]) + 1


@dataclass(frozen=True, slots=True)
class RowPictures:
    """The pictures of a row, in the order of their places.

    Attributes:
        has_axes: a placeholder has a position in time, height and width (M-RoPE, arXiv:2409.12191). Then
            `placed` has the pictures among cached tokens, too: later positions depend on them.
        is_partial: some of these are missing.
        are_blocks: the placeholders of a picture see each other, the later ones too.
    """

    placed: Sequence[PlacedPicture] = field(default_factory=list)
    has_axes: bool = False
    is_partial: bool = False
    are_blocks: bool = False

    @property
    def is_ready(self) -> bool:
        return all(one.picture.is_ready for one in self.placed)

    @property
    def failure(self) -> str:
        if self.is_partial:
            return "placeholders without a picture"
        return next(filter(None, (one.picture.failure for one in self.placed)), "")

    def positions(self, positions: Int64) -> Int64:
        """Positions int64 [tokens] of tokens of the row → int64 [3, tokens], by axis. A picture takes as many
        positions as its longer side has placeholders, and begins where the text before it ends.
        """
        found, shift = np.tile(positions, (3, 1)), 0
        for one in self.placed:
            first, (height, width) = int(one.places[0]), one.picture.shape.result().grid
            within = (positions >= first) & (positions < one.end)
            number = positions[within] - first
            axes = np.stack((np.zeros_like(number), number // width, number % width))
            found[:, within] = first + shift + axes
            shift += max(height, width) - len(one.places)
            found[:, positions >= one.end] = positions[positions >= one.end] + shift
        return found

    def seen_as_one(self, begin: int, end: int) -> list[tuple[int, int]]:
        """(first position, end) of pictures whose placeholders all see each other, of those that have some
        among the positions from `begin` to `end`.
        """
        found = [(int(one.places[0]), one.end) for one in self.left(begin)] if self.are_blocks else []
        return [(first, last) for first, last in found if first < end]

    def chunk_end(self, kv_len: int, end: int, most: int) -> int:
        """The end of a chunk from `kv_len` to about `end` that splits no picture that is seen as one. A
        picture may make it longer, up to `most`, if nothing else is in it.
        """
        for first, last in self.seen_as_one(kv_len, end):
            if end < last:
                return first if first > kv_len else last if last <= most else kv_len
        return end

    @property
    def shift(self) -> int:
        """What is added to positions after all pictures."""
        sides = (max(one.picture.shape.result().grid) - len(one.places) for one in self.placed)
        return sum(sides) if self.has_axes else 0

    def left(self, kv_len: int) -> Iterator[PlacedPicture]:
        """Yield the pictures that have placeholders after the first `kv_len` tokens."""
        return (one for one in self.placed if one.end > kv_len)

    def embedded_until(self, kv_len: int, end: int) -> int:
        """The first position from `kv_len` on, and before `end`, whose embedding is missing; else `end`."""
        for one in self.left(kv_len):
            picture = one.picture
            if picture.num_embedded < picture.num_tokens:
                missing = max(picture.num_embedded, int(np.searchsorted(one.places, kv_len)))
                return min(end, int(one.places[missing])) if missing < picture.num_tokens else end
        return end

    def embedded_in(self, begin: int, end: int) -> Iterator[tuple[Int64, PictureState, int]]:
        """Yield (places, picture, first) of the placeholders among the positions from `begin` to `end`:
        places int64 [tokens] after `begin`, which get the picture's embeddings from `first` on.
        """
        for one in self.left(begin):
            first, last = np.searchsorted(one.places, (begin, end))
            if first < last:
                yield one.places[first:last] - begin, one.picture, int(first)


def placeholders_of(ids: Int32, start: int, num_tokens: int, placeholder_id: int) -> Int64:
    """Positions of a picture's placeholders, int64 [placeholders]; other tokens may be between its parts."""
    found = np.flatnonzero(ids[start : start + num_tokens] == placeholder_id) + start
    return found.astype(np.int64)
