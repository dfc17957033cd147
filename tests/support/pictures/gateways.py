"""A gateway of a model that sees pictures, with a scripted worker; and pictures for it."""

import base64
import io
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from api.app import Gateway
from api.prompts.tokenizer import ModelTokenizer
from common.messages.request import Generate
from common.pictures import Size
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer, FakeWorker


def png(size: Size = (20, 30), color: str = "red", kind: str = "PNG") -> bytes:
    """The file of a picture of one colour."""
    target = io.BytesIO()
    Image.new("RGB", (size[1], size[0]), color).save(target, kind)
    return target.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*content: str | dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat: one of the user, whose parts are texts or pictures."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return [{"role": "user", "content": parts}]


def showing(
    url: str, folder: Path, answer: Answer | Callable[[Generate], Answer], sees: bool = True, **settings: Any
) -> AbstractAsyncContextManager[tuple[FakeWorker, Gateway, httpx.AsyncClient]]:
    """A worker that gives this answer, and a gateway with the tokenizer in a folder."""
    return answering(url, answer, tokenizer=ModelTokenizer.load(folder), sees=sees, **settings)
