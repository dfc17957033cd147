"""Picture layout: the text that stands in a model's prompt for a picture, from the picture's size alone.

A prompt has one marker for each picture. `expanded` puts the text of a layout in place of each marker, as
transformers' processor does; tokenized, that text has the picture's placeholders. The engine embeds the
picture at them. No torch, no pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages.request import Picture

Size = tuple[int, int]
"""Height and width of a picture in pixels, upright."""


class PictureError(ValueError):
    """A picture cannot be served; the text says why, as the end of a sentence about it."""


@dataclass(frozen=True, slots=True)
class PictureText:
    """What stands in a prompt for one picture.

    Attributes:
        text: it has `num_placeholders` times the text of the placeholder.
    """

    text: str
    num_placeholders: int


class PictureLayout(Protocol):
    """How the pictures of one model stand in its prompts.

    Attributes:
        marker: the text that stands for a picture until it is expanded; chat templates write it.
        inline: the text that stands for a picture in a prompt without a chat template; it has one marker.
        placeholder: text of the placeholder's token.
        placeholder_id: its id.
    """

    @property
    def marker(self) -> str: ...

    @property
    def inline(self) -> str: ...

    @property
    def placeholder(self) -> str: ...

    @property
    def placeholder_id(self) -> int: ...

    def picture_text(self, size: Size, num_pictures: int) -> PictureText:
        """What stands for a picture in a prompt that has `num_pictures`. Raises PictureError."""
        ...


def expanded(text: str, marker: str, pictures: Sequence[PictureText]) -> str:
    """A prompt's text with a picture's text in place of each marker. Raises PictureError."""
    parts = text.split(marker)
    if (num_markers := len(parts) - 1) != len(pictures):
        raise PictureError(f"the prompt has {num_markers} times {marker!r} for {len(pictures)} pictures")
    texts = [picture.text for picture in pictures]
    return "".join(piece for pair in zip(parts, [*texts, ""], strict=True) for piece in pair)


def placed(
    ids: Sequence[int], placeholder_id: int, digests: Sequence[str], pictures: Sequence[PictureText]
) -> list[Picture]:
    """Where the pictures' placeholders are in a prompt's ids. Raises PictureError if there are others."""
    places = [place for place, token_id in enumerate(ids) if token_id == placeholder_id]
    num_wanted = sum(picture.num_placeholders for picture in pictures)
    if len(places) != num_wanted:
        raise PictureError(f"the prompt has {len(places)} placeholders, and its pictures need {num_wanted}")
    return [*each_placed(places, digests, pictures)]


def each_placed(
    places: Sequence[int], digests: Sequence[str], pictures: Sequence[PictureText]
) -> Iterator[Picture]:
    done = 0
    for digest, picture in zip(digests, pictures, strict=True):
        first, last = places[done], places[done + picture.num_placeholders - 1]
        yield Picture(digest, first, last - first + 1)
        done += picture.num_placeholders
