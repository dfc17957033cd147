"""Formats of structural tags: what each consists of; their fields, read by name."""

from collections.abc import Mapping
from typing import Any

from api.errors import ApiError, cut, invalid, quoted

FIELDS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "max_whitespace_cnt"),
    "qwen_xml_parameter": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": ("excludes", "max_chars", "max_tokens"),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "dispatch": ("rules", "loop", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "token": ("token",),
    "exclude_token": ("exclude_tokens",),
    "any_tokens": ("exclude_tokens", "max_tokens"),
    "token_triggered_tags": (
        *("trigger_tokens", "tags", "at_least_one", "stop_after_first"),
        "exclude_tokens",
    ),
    "token_dispatch": ("rules", "loop", "exclude_tokens"),
}
"""Formats, and what each consists of."""
MAX_NUMBER = 2**31 - 1


def checked(value: Any, field: str) -> Mapping[str, Any]:
    """A format that has a type, and no field that the type has not. Raises ApiError."""
    form = object_of(value, field)
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        allowed = ", ".join(FIELDS)
        raise invalid(f"`{field}.type` must be one of {allowed}. Given: {quoted(kind)}", f"{field}.type")
    for name, item in form.items():
        if name not in (*FIELDS[kind], "type") and item not in (None, False, []):
            raise invalid(f"`{field}.{cut(name)}` is not supported", f"{field}.{cut(name)}")
    return form


def text_of(form: Mapping[str, Any], name: str, field: str, empty: bool = False) -> str:
    return as_text(form.get(name), f"{field}.{name}", empty)


def as_text(value: Any, field: str, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise needed(field, "a text" if empty else "a text that is not empty")
    return value


def token_of(value: Any, field: str) -> Any:
    """The token in a mark that is a format. Raises ApiError for a mark that is none."""
    form = object_of(value, field)
    if form.get("type", "token") != "token":
        raise invalid(f"`{field}.type` must be token. Given: {quoted(form['type'])}", f"{field}.type")
    return form.get("token")


def texts_of(form: Mapping[str, Any], name: str, field: str) -> list[str]:
    """A list of texts that are not empty; empty where it is missing."""
    items = form.get(name)
    if not isinstance(items, list | None):
        raise needed(f"{field}.{name}", "a list")
    return [as_text(item, f"{field}.{name}.{i}") for i, item in enumerate(items or [])]


def number_of(form: Mapping[str, Any], name: str, field: str, lowest: int = 0) -> int | None:
    """A count; None where it is missing."""
    value = as_whole(form.get(name))
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= MAX_NUMBER:
        raise needed(f"{field}.{name}", f"an integer of at least {lowest} and at most {MAX_NUMBER}")
    return value


def as_whole(value: Any) -> Any:
    """A number without a fraction is a whole one, as in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def flag_of(form: Mapping[str, Any], name: str, field: str, default: bool = False) -> bool:
    value = form.get(name)
    if not isinstance(value, bool | None):
        raise needed(f"{field}.{name}", "true or false")
    return default if value is None else value


def object_of(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise needed(field, "an object")
    return value


def items_of(form: Mapping[str, Any], name: str, field: str) -> list[tuple[Any, str]]:
    """The items of a list that is not empty, each with its own place. Raises ApiError."""
    items, place = form.get(name), f"{field}.{name}"
    if not isinstance(items, list) or not items:
        raise needed(place, "a list that is not empty")
    return [(item, f"{place}.{i}") for i, item in enumerate(items)]


def needed(field: str, what: str) -> ApiError:
    return invalid(f"`{field}` must be {what}", field)
