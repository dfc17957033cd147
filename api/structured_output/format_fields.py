"""Formats of structural tags: what each consists of; their fields, read by name."""

from collections.abc import Mapping
from typing import Any

from api.errors import ApiError, invalid

FIELDS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""Formats, and what each consists of."""


def checked(value: Any, field: str) -> Mapping[str, Any]:
    """A format that has a type, and no field that the type has not. Raises ApiError."""
    form = object_of(value, field)
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        allowed = ", ".join(FIELDS)
        raise invalid(f"`{field}.type` must be one of {allowed}. Given: {kind!r}", f"{field}.type")
    for name, item in form.items():
        if name not in (*FIELDS[kind], "type") and item not in (None, False, []):
            raise invalid(f"`{field}.{name}` is not supported", f"{field}.{name}")
    return form


def text_of(form: Mapping[str, Any], name: str, field: str, empty: bool = False) -> str:
    value, place = form.get(name), f"{field}.{name}".removesuffix(".")
    if not isinstance(value, str) or not (value or empty):
        raise invalid(f"`{place}` must be a text{'' if empty else ' that is not empty'}", place)
    return value


def flag_of(form: Mapping[str, Any], name: str, field: str) -> bool:
    value = form.get(name)
    if not isinstance(value, bool | None):
        raise invalid(f"`{field}.{name}` must be true or false", f"{field}.{name}")
    return bool(value)


def object_of(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise needed(field, "an object")
    return value


def items_of(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise needed(field, "a list that is not empty")
    return value


def needed(field: str, what: str) -> ApiError:
    return invalid(f"`{field}` must be {what}", field)
