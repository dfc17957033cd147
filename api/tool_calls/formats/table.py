"""Call formats: the ways in which models write calls, by the names that TOOL_CALL_PARSER takes
(`common/settings/format_names.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from api.tool_calls.formats import harmony, llama_json, mistral, tagged
from api.tool_calls.formats.marked_json import read_marked_json
from api.tool_calls.formats.pythonic import read_pythonic
from api.tool_calls.formats.sections import DEEPSEEK, KIMI, read_sections
from api.tool_calls.formats.tgi import read_tgi
from api.tool_calls.reading.scanner import Scan, Scanner


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        name: vLLM's name of its parser.
        marks: texts in which calls begin, end, or are divided. Where one is a special token of the model, its
            text must be among what the parser is fed.
        read: the generator that reads an answer.
        short_ids: the model's template takes ids of calls of 9 letters and digits.
        unmarked: what a call without a mark begins with.
        heads: how an object that is such a call begins, as models space it; `%s` is its function's name in
            quotes.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Scanner], Scan]
    short_ids: bool = False
    unmarked: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


def json_between(name: str, open: str, close: str = "") -> CallFormat:
    marks = tuple(mark for mark in (open, close) if mark)
    return CallFormat(name, marks, partial(read_marked_json, open, close))


def python_between(name: str, open: str, close: str) -> CallFormat:
    marks = tuple(mark for mark in (open, close) if mark)
    return CallFormat(name, marks, partial(read_pythonic, open, close), unmarked=("[",))


def functions_between(name: str, open: str, close: str) -> CallFormat:
    read = partial(tagged.read_functions, open, close)
    return CallFormat(name, (open, close), read, unmarked=(tagged.FUNCTION,))


HARMONY_MARKS = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, *harmony.ENDS)
MISTRAL_MARKS = (mistral.CALLS, mistral.CALL_ID, mistral.ARGS)
PAIR = tagged.PAIR
GLM_MARKS = (tagged.OPEN, tagged.CLOSE, PAIR.name, *PAIR.name_ends, PAIR.value, PAIR.end)

CALL_FORMATS = {
    form.name: form
    for form in (
        json_between("hermes", "<tool_call>", "</tool_call>"),
        functions_between("qwen3_coder", tagged.OPEN, tagged.CLOSE),
        functions_between("seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
        CallFormat(
            "llama3_json",
            (llama_json.PYTHON_TAG,),
            llama_json.read_llama_json,
            unmarked=("{",),
            heads=('{"name": %s, "parameters": {', '{"name":%s,"parameters":{'),
        ),
        python_between("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
        python_between("pythonic", "<|python_tag|>", ""),
        CallFormat("mistral", MISTRAL_MARKS, mistral.read_mistral, short_ids=True),
        CallFormat("deepseek_v3", DEEPSEEK, partial(read_sections, DEEPSEEK)),
        CallFormat("deepseek_v31", DEEPSEEK, partial(read_sections, DEEPSEEK)),
        CallFormat("kimi_k2", KIMI, partial(read_sections, KIMI)),
        CallFormat("glm45", GLM_MARKS, tagged.read_glm),
        CallFormat(harmony.HARMONY, HARMONY_MARKS, harmony.read_harmony),
        json_between("granite", "<|tool_call|>"),
        json_between("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
        json_between("jamba", "<tool_calls>", "</tool_calls>"),
        json_between("phi4_mini_json", "functools"),
        python_between("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
        CallFormat(
            "tgi",
            (),
            read_tgi,
            unmarked=("{",),
            heads=('{"function": {"_name": %s', '{"function":{"_name":%s'),
        ),
    )
}
"""Those that vLLM does not have: `lfm2`; `tgi`, for models that have none of their own."""
