"""Pictures of Gemma 3: each has the same number of placeholders, between two tokens and empty lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.pictures.layout import PictureText, Size


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """Gemma 3's layout: `begin` is the marker, too."""

    placeholder: str
    placeholder_id: int
    begin: str
    end: str
    num_placeholders: int

    @property
    def marker(self) -> str:
        return self.begin

    @property
    def inline(self) -> str:
        return self.begin

    def picture_text(self, size: Size, num_pictures: int) -> PictureText:
        inner = f"{self.begin}{self.placeholder * self.num_placeholders}{self.end}"
        return PictureText(f"\n\n{inner}\n\n", self.num_placeholders)


def fixed_layout(
    placeholder: tuple[str, int],
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
    names: Mapping[str, str],
) -> FixedLayout:
    text, token_id = placeholder
    return FixedLayout(
        placeholder=text,
        placeholder_id=token_id,
        begin=names.get("boi_token", "<start_of_image>"),
        end=names.get("eoi_token", "<end_of_image>"),
        num_placeholders=processor.get("image_seq_length", 256),
    )
