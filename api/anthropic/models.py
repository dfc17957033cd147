"""The list of models as Anthropic's API has it: pages, by the id before or after them."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from api.errors import invalid, quoted

VERSION_HEADER = "anthropic-version"
"""Clients of Anthropic's API send it with each request."""


def render_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model of OpenAI's list, as Anthropic's has it."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}


def page(
    models: Sequence[Mapping[str, Any]], limit: int, after_id: str | None, before_id: str | None
) -> dict[str, Any]:
    """Up to `limit` models after one id, or the last ones before another. Raises ApiError (422)."""
    if after_id is not None and before_id is not None:
        raise invalid("`after_id` and `before_id` exclude each other", "before_id")
    ids = [model["id"] for model in models]
    if before_id is not None:
        end = place(ids, before_id, "before_id")
        chosen, has_more = models[max(end - limit, 0) : end], end > limit
    else:
        begin = 0 if after_id is None else place(ids, after_id, "after_id") + 1
        chosen, has_more = models[begin : begin + limit], begin + limit < len(models)
    data = [render_info(model) for model in chosen]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": has_more}


def place(ids: Sequence[str], model_id: str, name: str) -> int:
    if model_id not in ids:
        raise invalid(f"`{name}` must be a model of the list. Given: {quoted(model_id)}", name)
    return ids.index(model_id)
