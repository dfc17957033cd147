"""Picture sources: where a client says that a picture of its prompt is. A source is a URL, in a part of a
message or as `![](…)` in a text.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError, invalid, quoted

PICTURE_TYPES = ("image_url", "input_image", "image")
"""Types of parts that are pictures: OpenAI's in chats and in responses, and transformers'."""
DETAILS = ("auto", "low", "high", "original")
INLINE = "![]("
"""What begins a picture in a text, as TGI has it: Markdown's without a description."""
URL_STARTS = ("data:", "https://", "http://")


@dataclass(frozen=True, slots=True)
class PictureSource:
    """One picture of a prompt.

    Attributes:
        field: the name of the field that has it, for errors.
    """

    url: str
    field: str


def is_data(url: str) -> bool:
    """Whether a URL has the picture's bytes in it."""
    return url[:5].lower() == "data:"


def is_picture(kind: str) -> bool:
    return kind in PICTURE_TYPES


def read_part(part: Mapping[str, Any], field: str) -> PictureSource:
    """The source of a part that is a picture. Raises ApiError."""
    kind = part.get("type")
    if part.get("file_id") is not None:
        raise invalid(f"`{field}.file_id` is not supported: there is no store of files", f"{field}.file_id")
    given = part.get("image_url") if kind != "image" else part.get("url", part.get("image"))
    detail = part.get("detail")
    name = f"{field}.{'image_url' if kind != 'image' else 'url'}"
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given, name = given.get("url"), f"{name}.url"
    if not isinstance(given, str):
        raise invalid(f"`{name}` must be a string, the URL of a picture", name)
    if detail is not None and detail not in DETAILS:
        raise invalid(
            f"`{field}.detail` must be one of {', '.join(DETAILS)}. Given: {quoted(detail)}",
            f"{field}.detail",
        )
    return PictureSource(given, name)


def unknown_part(kind: object, name: str, field: str, sees: bool) -> ApiError:
    """The error of a part that is no text, and no picture that this model sees."""
    takes = "text and pictures only" if sees else "text only"
    return invalid(f"`{name}` is of type {quoted(kind)}: this model takes {takes}", field)


def split_text(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a text between its pictures, each with the URL of the picture after it; "" at the end. It
    takes linear time, whatever the text.
    """
    done = place = 0
    while (place := text.find(INLINE, place)) >= 0:
        start = place + len(INLINE)
        if text.startswith(URL_STARTS, start):
            if (end := text.find(")", start)) < 0:
                break
            yield text[done:place], text[start:end]
            done = end + 1
            start = done
        place = start
    yield text[done:], ""
