"""Input items: the items of `input`, validated and completed as they are stored and listed."""

from collections.abc import Mapping, Sequence
from typing import Any

from api.errors import invalid, quoted
from api.openai.responses_items import Item, item_id
from api.pictures.source import is_data, unknown_part
from api.pictures.source import read_part as picture_source

ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of content parts that have a `text`."""
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Types of items → the prefixes of their ids."""


def read_items(given: str | Sequence[Mapping[str, Any]], request_id: str, sees: bool = False) -> list[Item]:
    """The items of `input`, complete; references stay as they are. Raises ApiError.

    Args:
        sees: whether the model sees pictures.
    """
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not messages:
        raise invalid("`input` cannot be empty", "input")
    return [read_item(one, f"input[{i}]", request_id, i, sees) for i, one in enumerate(messages)]


def read_item(given: Mapping[str, Any], name: str, request_id: str, i: int, sees: bool) -> Item:
    """The item in position `i`. Raises ApiError."""
    kind = kind_of(given)
    if kind == "item_reference":
        return {"type": kind, "id": text_of(given, "id", name)}
    if kind not in ID_PREFIXES:
        allowed = ", ".join((*ID_PREFIXES, "item_reference"))
        raise invalid(f"`{name}.type` must be one of {allowed}. Given: {quoted(kind)}", f"{name}.type")
    if given.get("id") is not None:
        text_of(given, "id", name)
    head = {
        "id": given.get("id") or item_id(ID_PREFIXES[kind], request_id, f"i{i}"),
        "type": kind,
        "status": "completed",
    }
    match kind:
        case "message":
            return head | read_message(given, name, sees)
        case "function_call":
            return head | {key: text_of(given, key, name) for key in ("call_id", "name", "arguments")}
        case "function_call_output":
            output = given.get("output")
            if not isinstance(output, str):
                output = read_parts(output, f"{name}.output", "input_text", sees)
            return head | {"call_id": text_of(given, "call_id", name), "output": output}
        case _:
            return head | read_reasoning(given, name)


def kind_of(given: Mapping[str, Any]) -> str:
    """The type of an item; messages and references may leave it out."""
    kind = given.get("type")
    if kind is None:
        return "message" if "role" in given or "content" in given else "item_reference"
    return kind if isinstance(kind, str) else repr(kind)


def read_message(given: Mapping[str, Any], name: str, sees: bool) -> Item:
    role = given.get("role")
    if role not in ROLES:
        raise invalid(
            f"`{name}.role` must be one of {', '.join(ROLES)}. Given: {quoted(role)}", f"{name}.role"
        )
    content, kind = given.get("content"), "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        return {"role": role, "content": [new_part(content, kind)]}
    return {"role": role, "content": read_parts(content, f"{name}.content", kind, sees)}


def read_reasoning(given: Mapping[str, Any], name: str) -> Item:
    """Reasoning of an earlier answer, without its encrypted content, which cannot be read here."""
    lists = {"summary": "summary_text", "content": "reasoning_text"}
    return {key: read_parts(given.get(key) or [], f"{name}.{key}", kind) for key, kind in lists.items()}


def read_parts(given: Any, name: str, kind: str, sees: bool = False) -> list[dict[str, Any]]:
    """The parts of a content; all texts become parts of the type `kind`. Raises ApiError."""
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise invalid(f"`{name}` must be a text or a list of parts", name)
    return [read_part(part, f"{name}[{i}]", kind, sees) for i, part in enumerate(given)]


def read_part(given: Mapping[str, Any], name: str, kind: str, sees: bool) -> dict[str, Any]:
    if given.get("type") == "refusal":
        return new_part(text_of(given, "refusal", name), kind)
    if sees and given.get("type") == "input_image" and kind == "input_text":
        url = picture_source(given, name).url
        return {"type": "input_image", "image_url": url, "detail": given.get("detail") or "auto"}
    if given.get("type") not in TEXT_PARTS:
        raise unknown_part(given.get("type"), name, f"{name}.type", sees)
    return new_part(text_of(given, "text", name), kind)


def new_part(text: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def text_of(given: Mapping[str, Any], key: str, name: str) -> str:
    """A field that must be a string. Raises ApiError."""
    value = given.get(key)
    if not isinstance(value, str):
        raise invalid(f"`{name}.{key}` must be a string", f"{name}.{key}")
    return value


def join_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def chat_content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """A content as a chat's message has it: a text, or parts where there are pictures."""
    if isinstance(content, str) or not any(part["type"] == "input_image" for part in content):
        return join_text(content)
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
        if part["type"] == "input_image"
        else {"type": "text", "text": part["text"]}
        for part in content
    ]


def has_data(items: Sequence[Item]) -> bool:
    """Whether items have the bytes of pictures in them."""
    contents = [item.get("content") or item.get("output") for item in items]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part["type"] == "input_image" and is_data(part["image_url"]) for part in parts)
