"""LoRA settings: the adapters that LORA_ADAPTERS names, in TGI's spellings and in vLLM's."""

import json
import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from common.ids import ADAPTER_NAME, REVISION
from common.settings.types import SettingError

NEXT_ADAPTER = re.compile(r",(?![^{]*\})")
"""A comma between two adapters: not one inside of a JSON object."""


class AdapterSource(NamedTuple):
    """An adapter as a person names it.

    Attributes:
        path: its folder, or its hub id, perhaps with `@revision`.
    """

    name: str
    path: str


def to_adapters(value: Any) -> Any:
    """Words `name=path`, of `id`, `id@revision`, `name=path@revision`, or `{"name": …, "path": …}`."""
    if not isinstance(value, str):
        return value
    words = NEXT_ADAPTER.split(value.strip().removeprefix("[").removesuffix("]"))
    return [to_word(word.strip()) for word in words if word.strip()]


def to_word(word: str) -> str:
    """Raises PydanticCustomError for JSON that is no adapter."""
    if not word.startswith("{"):
        return word
    try:
        found = json.loads(word)
        return f"{found['name']}={found['path']}"
    except (ValueError, KeyError, TypeError):
        why = 'an adapter in JSON is as {"name": "sql", "path": "/adapters/sql"}'
        raise PydanticCustomError("unserved", "{why}", {"why": why}) from None


LoraAdapters = Annotated[tuple[str, ...], BeforeValidator(to_adapters)]


def read_adapter(word: str) -> AdapterSource:
    """An adapter of LORA_ADAPTERS; one without a name has its id's. Raises SettingError."""
    name, equals, path = word.partition("=")
    if not equals:
        path, (name, at, revision) = word, word.partition("@")
        if at and not REVISION.fullmatch(revision):
            raise SettingError("lora_adapters", f"{word!r} has no revision after the @")
    if not ADAPTER_NAME.fullmatch(name) or not path:
        cause = f"{word!r} is not an adapter, as sql=/adapters/sql, org/adapter or sql=org/adapter@revision"
        raise SettingError("lora_adapters", cause)
    return AdapterSource(name, path)


def read_adapters(words: tuple[str, ...]) -> list[AdapterSource]:
    """The adapters of LORA_ADAPTERS. Raises SettingError, also for two of one name."""
    found = [read_adapter(word) for word in words]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise SettingError("lora_adapters", f"{name!r} is the name of two adapters")
    return found
