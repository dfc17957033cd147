"""Conversation: what stands in front of the input of a response, and the items that the input refers to."""

from starlette.requests import Request

from api.errors import ApiError, cut, invalid, quoted
from api.response_object.items import Item
from api.response_object.response import response_id
from api.responses.input_items import ITEM_ID
from api.responses.stored import StoredResponse, find_response, read_response, render_response

PREVIOUS = "previous_response_id"


async def read_conversation(request: Request, previous_id: str | None) -> list[Item]:
    """The items of the conversation up to the end of an earlier response. Raises ApiError."""
    if previous_id is None:
        return []
    stored = await find_response(request, previous_id)
    if stored is None:
        text = f"Previous response with id '{cut(previous_id)}' not found."
        raise ApiError(422, "validation", text, PREVIOUS, f"{PREVIOUS.removesuffix('_id')}_not_found")
    output = await read_output(stored)
    if output is None:
        raise invalid(f"`{PREVIOUS}`: that response is not completed", PREVIOUS)
    return [*stored.input, *output]


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
            request_id = matched[1] if matched else ""
            if request_id not in known:
                known[request_id] = await read_all_items(request, request_id)
            if item["id"] not in known[request_id]:
                name = f"input[{i}].id"
                raise invalid(f"`{name}`: there is no stored item {quoted(item['id'])}", name)
            item = known[request_id][item["id"]]
        resolved.append(item)
    return resolved


async def read_all_items(request: Request, request_id: str) -> dict[str, Item]:
    """All items of a stored response by id; none if there is no such response. Raises ApiError."""
    stored = await find_response(request, response_id(request_id))
    if stored is None:
        return {}
    return {item["id"]: item for item in (*stored.input, *(await read_output(stored) or []))}
