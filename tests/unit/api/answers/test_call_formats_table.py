from typing import get_args

from api.answers.call_formats import CALL_FORMATS
from common.settings.settings import Settings
from common.settings.types import CALL_FORMAT_ALIASES, ToolCallParser


def test_the_formats_are_the_values_of_tool_call_parser() -> None:
    names, *_ = get_args(ToolCallParser)
    assert set(get_args(names)) == CALL_FORMATS.keys()


def test_formats_have_other_names() -> None:
    assert not CALL_FORMAT_ALIASES.keys() & CALL_FORMATS.keys()
    assert Settings.read(["--tool-call-parser", "qwen3_xml"], {}).tool_call_parser == "qwen3_coder"
