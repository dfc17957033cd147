"""Formats of calls and reasoning: how a model writes them, and what shows that it does.

Their names are those of TOOL_CALL_PARSER and REASONING_PARSER.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from api.answers.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, read_harmony
from api.answers.json_calls import (
    ARGS,
    CALL_ID,
    DEEPSEEK,
    KIMI,
    PYTHON_TAG,
    TOOL_CALLS,
    SectionMarks,
    read_calls,
    read_llama_json,
    read_marked,
    read_mistral,
    read_section,
    read_tgi,
)
from api.answers.python_calls import read_pythonic
from api.answers.scanner import SPACE, Scan, Scanner
from api.answers.tagged_arguments import END_TOOL_CALL, FUNCTION, PAIR, TOOL_CALL, read_function, read_glm

HARMONY = "openai"
"""The format in which gpt-oss writes thinking, calls and content alike."""
HARMONY_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
MISTRAL_MARKS = (TOOL_CALLS, CALL_ID, ARGS)
GLM_MARKS = (TOOL_CALL, END_TOOL_CALL, PAIR.name, PAIR.name_end, PAIR.value, PAIR.end)
THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model thinks: between two marks at the beginning of its answer.

    Attributes:
        always: an answer begins with thinking, even without the first mark.
    """

    name: str
    open: str
    close: str
    always: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return self.open, self.close

    def is_closed(self, prompt: str) -> bool:
        """Whether this prompt ends with thinking that is over: the answer has none."""
        return prompt.rstrip(SPACE).endswith(self.close)

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside of thinking."""
        ends_open = prompt.rstrip(SPACE).endswith(self.open)
        return ends_open or (self.always and not self.is_closed(prompt))


REASONING_FORMATS = {
    form.name: form
    for form in (
        ReasoningFormat("deepseek_r1", *THINK, always=True),
        ReasoningFormat("deepseek_v3", *THINK),
        ReasoningFormat("qwen3", *THINK),
        ReasoningFormat("glm45", *THINK),
        ReasoningFormat("hunyuan_a13b", *THINK),
        ReasoningFormat("holo2", *THINK),
        ReasoningFormat("kimi_k2", *THINK),
        ReasoningFormat("minimax_m2", *THINK, always=True),
        ReasoningFormat("ernie45", *THINK),
        ReasoningFormat("nemotron_v3", *THINK),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    )
}


def read_reasoning(scanner: Scanner, form: ReasoningFormat, begins_inside: bool) -> Scan:
    """Read thinking, if the answer begins with it."""
    yield from scanner.skip()
    if not (yield from scanner.literal(form.open)) and not begins_inside:
        scanner.position = 0
        return
    scanner.forget(scanner.position)
    scanner.trim()
    yield from scanner.pass_until(scanner.add_reasoning, form.close)
    scanner.trim()


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
    return CallFormat(name, marks, partial(read_marked, [open], read_calls, close))


def python_between(name: str, open: str, close: str) -> CallFormat:
    marks = tuple(mark for mark in (open, close) if mark)
    return CallFormat(name, marks, partial(read_pythonic, open, close), unmarked=("[",))


def functions_between(name: str, open: str, close: str) -> CallFormat:
    return CallFormat(
        name,
        (open, close),
        partial(read_marked, [open, FUNCTION], read_function, close),
        unmarked=(FUNCTION,),
    )


def sections(name: str, marks: SectionMarks) -> CallFormat:
    read_one = partial(read_section, marks)
    begins = [marks.calls_begin, marks.call_begin]
    return CallFormat(name, marks, partial(read_marked, begins, read_one, ""))


CALL_FORMATS = {
    form.name: form
    for form in (
        json_between("hermes", TOOL_CALL, END_TOOL_CALL),
        functions_between("qwen3_coder", TOOL_CALL, END_TOOL_CALL),
        functions_between("seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
        CallFormat(
            "llama3_json",
            (PYTHON_TAG,),
            read_llama_json,
            unmarked=("{",),
            heads=('{"name": %s, "parameters": {', '{"name":%s,"parameters":{'),
        ),
        python_between("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
        python_between("pythonic", "<|python_tag|>", ""),
        CallFormat(
            "mistral", MISTRAL_MARKS, partial(read_marked, [TOOL_CALLS], read_mistral, ""), short_ids=True
        ),
        sections("deepseek_v3", DEEPSEEK),
        sections("deepseek_v31", DEEPSEEK),
        sections("kimi_k2", KIMI),
        CallFormat("glm45", GLM_MARKS, partial(read_marked, [TOOL_CALL], read_glm, "")),
        CallFormat(HARMONY, HARMONY_MARKS, read_harmony),
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
"""By name. vLLM does not have `lfm2`, nor `tgi`, which is for models without a format of their own."""
CALL_FORMAT_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "glm47": "glm45",
    "llama4": "llama4_pythonic",
}
"""Other names of call formats, in vLLM and SGLang."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What shows that a model writes in a format.

    Attributes:
        texts: all of them stand in the template.
        token: a token of the vocabulary that shows it where the template does not.
    """

    format: str
    texts: tuple[str, ...]
    token: str | None = None

    def are_in(self, template: str) -> bool:
        return all(text in template for text in self.texts)


CALL_SIGNS = (
    Signs(HARMONY, ("<|channel|>",), "<|channel|>"),
    Signs("kimi_k2", ("<|tool_call_begin|>",), "<|tool_call_begin|>"),
    Signs("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    Signs("deepseek_v31", ("<｜tool▁sep｜>",), "<｜tool▁sep｜>"),
    Signs("glm45", ("<arg_key>",), "<arg_key>"),
    Signs("seed_oss", ("<seed:tool_call>",)),
    Signs("qwen3_coder", ("<function=", "<parameter=")),
    Signs("lfm2", ("<|tool_call_start|>",)),
    Signs("lfm2", ("<|tool_list_start|>",)),
    Signs("nemotron_json", ("<TOOLCALL>",)),
    Signs("granite", ("<|tool_call|>",)),
    Signs("jamba", ("<tool_calls>",)),
    Signs("phi4_mini_json", ("functools",)),
    Signs("hermes", ("<tool_call>",)),
    Signs("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]"),
    Signs("llama4_pythonic", ("func_name1(", "<|header_start|>")),
    Signs("pythonic", ("func_name1(",)),
    Signs("llama3_json", ('"parameters": ', "ipython")),
)
"""The model's format is that of the first signs that it shows."""
REASONING_SIGNS = (
    Signs("mistral", ("[THINK]",)),
    Signs("seed_oss", ("<seed:think>",)),
    Signs("glm45", ("<think>", "<arg_key>")),
    Signs("kimi_k2", ("<think>", "<|tool_call_begin|>")),
    Signs("deepseek_v3", ("</think>", "<｜Assistant｜>", "thinking")),
    Signs("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    Signs("qwen3", ("<think>",)),
    Signs("qwen3", ("</think>",)),
)
OTHER_THINKING = ("<response>", "<|channel|>")
"""Texts of templates that mean something else by `<think>`, or whose format of calls has the thinking."""


def find_call_format(template: str, id_of: Callable[[str], int | None]) -> CallFormat | None:
    """The format in which a model writes calls; None if its template has no tools, or another format."""
    if "tools" not in template:
        return None
    found = (
        signs.format
        for signs in CALL_SIGNS
        if signs.are_in(template) or (signs.token and id_of(signs.token) is not None)
    )
    return next((CALL_FORMATS[name] for name in found), None)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format in which a model thinks; None if it does not, or if its format of calls has the thinking."""
    if any(text in template for text in OTHER_THINKING):
        return None
    found = (signs.format for signs in REASONING_SIGNS if signs.are_in(template))
    return next((REASONING_FORMATS[name] for name in found), None)
