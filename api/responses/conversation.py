"""Conversation: what stands in front of the input of a response, and the items that the input refers to."""

from starlette.requests import Request

from api.errors import ApiError, invalid
from api.response_object.items import Item
from api.responses.input_items import ITEM_ID, unknown_item
from api.responses.stored import StoredResponse, find_response, read_response, render_response

PREVIOUS = "previous_response_id"


async def read_conversation(request: Request, previous_id: str | None) -> list[Item]:
    """The items of the conversation up to the end of an earlier response. Raises ApiError."""
    if previous_id is None:
        return []
    try:
        stored = await find_response(request, previous_id)
    except ApiError as error:
        if error.status != 404:
            raise
        text = f"Previous response with id '{previous_id[:80]}' not found."
        raise ApiError(
            422, "validation", text, PREVIOUS, f"{PREVIOUS.removesuffix('_id')}_not_found"
        ) from error
    output = await read_output(stored)
    if output is None:
        raise invalid(f"`{PREVIOUS}`: that response is not completed", PREVIOUS)
    return [*stored.before, *stored.items, *output]


async def read_output(stored: StoredResponse) -> list[Item] | None:
    """The output of a response; None if it has not finished well."""
    rendered = await render_response(stored, await read_response(stored))
    return rendered["output"] if rendered["status"] in ("completed", "incomplete") else None


async def resolve_references(request: Request, items: list[Item]) -> list[Item]:
    """The items, with those that they refer to in place of references. Raises ApiError."""
    known: dict[str, dict[str, Item]] = {}
    resolved = []
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            matched = ITEM_ID.fullmatch(item["id"])
            if matched is None:
                raise unknown_item(item["id"], f"input[{i}]")
            if matched[1] not in known:
                known[matched[1]] = await read_all_items(request, matched[1], item["id"], f"input[{i}]")
            item = known[matched[1]].get(item["id"]) or raise_unknown(item["id"], f"input[{i}]")
        resolved.append(item)
    return resolved


def raise_unknown(own_id: str, name: str) -> Item:
    raise unknown_item(own_id, name)


async def read_all_items(request: Request, request_id: str, own_id: str, name: str) -> dict[str, Item]:
    """All items of a stored response by id. Raises ApiError."""
    try:
        stored = await find_response(request, f"resp_{request_id}")
    except ApiError as error:
        if error.status != 404:
            raise
        raise unknown_item(own_id, name) from error
    output = await read_output(stored) or []
    return {item["id"]: item for item in (*stored.before, *stored.items, *output)}
