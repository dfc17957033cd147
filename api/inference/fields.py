"""Kinds of fields that bodies have. What a number may be is checked with the rest of what was asked, and only
described here.
"""

from typing import Annotated, Any, TypeVar

from pydantic import Field

from api.inference.ranges import RANGES

Item = TypeVar("Item")

Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which the first wrong item is told: to tell a million takes seconds."""


def ranged(name: str, description: str | None = None) -> Any:
    """A number in its range."""
    return Field(default=None, description=description, json_schema_extra=RANGES[name].schema)


def least(value: int, description: str) -> Any:
    """A whole number that is not less."""
    return Field(default=None, description=description, json_schema_extra={"minimum": value})
