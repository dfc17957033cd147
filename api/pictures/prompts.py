"""Pictures of prompts: loaded, given their placeholders in the text, found again among the token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.errors import invalid
from api.pictures.keep import PictureKeeper
from api.pictures.layouts import PictureLayout, PictureText, expanded, placed
from api.pictures.load import LoadedPicture, PictureLoader, text_of
from api.pictures.source import PictureSource, split_text
from api.prompts.control_texts import Guarded, Rendered
from common.broker.pool_client import PoolClient
from common.messages.request import Picture
from common.pictures import PictureError
from common.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class ShownPictures:
    """The pictures of a prompt whose text has their placeholders.

    Attributes:
        prompt: with the pictures' texts in place of markers.
        field: the name of the prompt's field, for errors.
    """

    prompt: Rendered
    loaded: Sequence[LoadedPicture]
    texts: Sequence[PictureText]
    placeholder_id: int
    field: str

    def place(self, ids: Sequence[int]) -> list[Picture]:
        """Where the pictures are in the prompt's ids. Raises ApiError."""
        digests = [one.digest for one in self.loaded]
        try:
            return placed(ids, self.placeholder_id, digests, self.texts)
        except PictureError as error:
            raise invalid(f"`{self.field}`: {error}", self.field) from error


class PicturePrompts:
    """Shows the model of one pool the pictures of prompts."""

    def __init__(self, client: PoolClient, settings: Settings, layout: PictureLayout | None) -> None:
        self.layout = layout
        self.loader = PictureLoader(settings)
        self.keeper = PictureKeeper(client, settings.max_kept_pictures_bytes)

    async def show(
        self, prompt: Rendered, sources: Sequence[PictureSource], field: str, sees: bool
    ) -> ShownPictures:
        """Load pictures, and put their placeholders into the prompt. Raises ApiError.

        Args:
            field: the name of the prompt's field.
            sees: whether a worker computes pictures.
        """
        layout, first = self.layout, sources[0].field
        if layout is None or not sees:
            raise invalid(f"`{first}` is a picture: this model takes text only", first)
        loaded = await self.loader.load(sources)
        texts = [
            text_of(layout, one, len(loaded), source.field)
            for one, source in zip(loaded, sources, strict=True)
        ]
        try:
            shown = with_texts(prompt, layout.marker, texts)
        except PictureError as error:
            raise invalid(f"`{field}`: {error}", field) from error
        return ShownPictures(shown, loaded, texts, layout.placeholder_id, field)

    def inline(self, text: str, field: str) -> tuple[str, list[PictureSource]]:
        """A text with markers in place of TGI's `![](URL)`, and these pictures. For a model that sees none
        they are text, as in TGI.
        """
        if self.layout is None or "![](" not in text:
            return text, []
        parts = [*split_text(text)]
        marked = "".join(before + self.layout.inline * bool(url) for before, url in parts)
        return marked, [PictureSource(url, field) for _, url in parts if url]


def with_texts(prompt: Rendered, marker: str, texts: Sequence[PictureText]) -> Rendered:
    """A prompt with pictures' texts in place of markers; what a client wrote is none. Raises PictureError."""
    if prompt.guarded is None:
        return Rendered(expanded(prompt.text, marker, texts))
    guarded = Guarded(expanded(prompt.guarded.text, marker, texts), prompt.guarded.guard)
    return Rendered(guarded.text.replace(guarded.guard, ""), guarded)
