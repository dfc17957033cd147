"""The description of the API at /docs and /api-doc/openapi.json. Routes read their bodies themselves, so they
say here what these are.
"""

from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

REFERENCE = "#/components/schemas/{model}"

ErrorResponses = dict[int | str, dict[str, Any]]
"""A route's `responses` besides 200."""


def json_body(shape: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is JSON of this shape."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema(shape, "validation")}},
        }
    }


def event_stream(shape: type[BaseModel], *words: str) -> dict[str, Any]:
    """The content of a route's answer that is a stream of frames of this shape, and of these words."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": schema(shape, "serialization"),
    }
    if words:
        data = {"anyOf": [{"enum": list(words)}, data]}
    return {
        "text/event-stream": {
            "schema": {"type": "object", "required": ["data"], "properties": {"data": data}}
        }
    }


def error_responses(shape: type[BaseModel], descriptions: dict[int, str]) -> ErrorResponses:
    """Why a route refuses, by status; the body is of this shape."""
    return {
        status: {"model": shape, "description": description} for status, description in descriptions.items()
    }


@cache
def schema(shape: type[BaseModel], mode: Any) -> dict[str, Any]:
    """With definitions of what it refers to under `$defs`, from where `describe` takes them."""
    return shape.model_json_schema(ref_template=REFERENCE, mode=mode)


def build_document(app: FastAPI) -> dict[str, Any]:
    """The whole description; computed once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=version("tokenfleet"), routes=app.routes)
        definitions: dict[str, Any] = {}
        document["paths"] = hoist_definitions(document["paths"], definitions)
        document["components"]["schemas"] |= definitions
        app.openapi_schema = document
    return app.openapi_schema


def hoist_definitions(node: Any, definitions: dict[str, Any]) -> Any:
    """A copy of `node` without `$defs`, which go into `definitions`."""
    if isinstance(node, list):
        return [hoist_definitions(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    definitions |= node.get("$defs", {})
    return {key: hoist_definitions(value, definitions) for key, value in node.items() if key != "$defs"}
