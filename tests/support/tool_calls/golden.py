"""Transcripts of answers, and what each says."""

from collections.abc import Mapping

from api.answers.scanner import Tool
from tests.support.tool_calls.answers import Answer, Reading, cuts

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["c", "f"]},
        "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"$ref": "#/$defs/places"},
        "exact": {"type": "boolean"},
    },
    "$defs": {"places": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = (Tool("weather", SCHEMA), Tool("now", {"type": "object", "properties": {}}))


def check(reading: Reading, golden: Mapping[str, Answer]) -> None:
    """Every cut of each text says the same."""
    for text, answer in golden.items():
        assert reading.read(text) == answer, text
        for pieces in cuts(text):
            assert reading.read(*pieces) == answer, pieces
