"""Formats of calls and reasoning: how a model writes them, and what shows that it does.

Their names are those of TOOL_CALL_PARSER and REASONING_PARSER.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial

from api.answers.call_readers import (
    ARGS,
    CALL_ID,
    CHANNEL,
    CONSTRAIN,
    DEEPSEEK,
    END_FUNCTION,
    END_TOOL_CALL,
    ENDS,
    FUNCTION,
    FUNCTIONS,
    KIMI,
    MESSAGE,
    PAIR,
    PARAMETER,
    PYTHON_TAG,
    START,
    TGI_FUNCTION,
    TOOL_CALL,
    TOOL_CALLS,
    SectionMarks,
    read_call,
    read_calls,
    read_harmony,
    read_lines,
    read_marked,
    read_mistral,
    read_python_list,
    read_section,
    read_tagged_call,
    read_tgi,
)
from api.answers.scanner import SPACE, Scan, Scanner

HARMONY = "openai"
"""The format in which gpt-oss writes thinking, calls and content alike."""
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
class Writing:
    """How calls are written, by a model of which a grammar forces them.

    In `call`, `$name` is the function's name, and `$number` the call's number. The arguments are `$arguments`
    as a JSON object, `$arguments_with_name` as one that has the function's name, too, `$parameters` and
    `$pairs` between tags, `$keywords` as in Python.

    Attributes:
        mark: after this text, wherever it stands, calls follow; "" if they can only begin an answer.
        open: what stands between the mark and the first call.
        call: one call.
        between: what stands between two calls; None if there may be only one.
        close: what stands after the last call.
        needs: marks that must be special tokens; with others the model writes calls in another way.
        may_open: a special token that may stand before all.
        other_calls: other ways to write one call.
    """

    mark: str
    open: str
    call: str
    between: str | None
    close: str = ""
    needs: tuple[str, ...] = ()
    may_open: str = ""
    other_calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        name: vLLM's name of its parser.
        marks: texts in which calls begin, end, or are divided. Where one is a special token of the model, its
            text must be among what the parser is fed.
        read: the generator that reads an answer.
        writings: how a grammar has calls written: the first of them that the model's special tokens allow.
        short_ids: the model's template takes ids of calls of 9 letters and digits.
        unmarked: what a call without a mark begins with.
        heads: how an object that is such a call begins, as models space it; `%s` is its function's name in
            quotes.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Scanner], Scan]
    writings: tuple[Writing, ...]
    short_ids: bool = False
    unmarked: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def writing(self, special: Container[str]) -> Writing:
        """How a model with these special tokens writes calls."""
        return next(one for one in self.writings if all(mark in special for mark in one.needs))


HARMONY_CALL = f" to={FUNCTIONS}$name{CHANNEL}commentary json{MESSAGE}$arguments"
CHANNEL_CALL = f"{CHANNEL}commentary to={FUNCTIONS}$name {CONSTRAIN}json{MESSAGE}$arguments"
OBJECT = '{"name": "$name", "arguments": $arguments}'


def each_between(open: str, call: str, close: str) -> Writing:
    """Each call stands between two marks, and on lines of its own."""
    return Writing(open, "", call, f"{close}\n{open}", close)


def json_list(name: str, open: str, close: str = "", written: str = "") -> CallFormat:
    """A list of objects between two marks; some formats have no second mark."""
    marks = tuple(mark for mark in (open, close) if mark)
    writing = Writing(written or open, "" if written else "[", OBJECT, ", ", f"]{close}")
    return CallFormat(name, marks, partial(read_marked, [open], read_calls, close), (writing,))


def python_list(name: str, open: str, close: str) -> CallFormat:
    """A list of calls as in Python; where the marks around it are no special tokens, it has none."""
    marks = tuple(mark for mark in (open, close) if mark)
    plain = Writing("", "[", "$name($keywords)", ", ", "]")
    marked = replace(plain, mark=open, close=f"]{close}", needs=(open, close))
    writings = (marked, plain) if close else (plain,)
    read = partial(read_lines, read_python_list, open, close, "\n[", "")
    return CallFormat(name, marks, read, writings, unmarked=("[",))


def functions_between(name: str, open: str, close: str) -> CallFormat:
    """Functions with their parameters in tags, between two marks, which the model may leave out."""
    read_one = partial(read_tagged_call, FUNCTION, ">", PARAMETER, END_FUNCTION)
    writing = each_between(open, f"\n{FUNCTION}$name>\n$parameters{END_FUNCTION}\n", close)
    read = partial(read_marked, [open, FUNCTION], read_one, close)
    return CallFormat(name, (open, close), read, (writing,), unmarked=(FUNCTION,))


def sections(name: str, marks: SectionMarks, call: str, between: str = "") -> CallFormat:
    """A section of calls, each between two marks. `|` in the call is the mark before its arguments."""
    one = f"{marks.call_begin}{call.replace('|', marks.arguments_begin)}{marks.call_end}"
    writing = Writing(marks.calls_begin, "", one, between, marks.calls_end)
    read = partial(read_marked, [marks.calls_begin, marks.call_begin], partial(read_section, marks), "")
    return CallFormat(name, marks, read, (writing,))


CALL_FORMATS = {
    form.name: form
    for form in (
        CallFormat(
            "hermes",
            (TOOL_CALL, END_TOOL_CALL),
            partial(read_marked, [TOOL_CALL], read_calls, END_TOOL_CALL),
            (each_between(TOOL_CALL, f"\n{OBJECT}\n", END_TOOL_CALL),),
        ),
        functions_between("qwen3_coder", TOOL_CALL, END_TOOL_CALL),
        functions_between("seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
        CallFormat(
            "llama3_json",
            (PYTHON_TAG,),
            partial(read_lines, read_call, PYTHON_TAG, "", "\n{", ";"),
            (Writing("", "", '{"name": "$name", "parameters": $arguments}', "; ", may_open=PYTHON_TAG),),
            unmarked=("{",),
            heads=('{"name": %s, "parameters": {', '{"name":%s,"parameters":{'),
        ),
        python_list("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
        python_list("pythonic", "<|python_tag|>", ""),
        CallFormat(
            "mistral",
            (TOOL_CALLS, CALL_ID, ARGS),
            partial(read_marked, [TOOL_CALLS], read_mistral, ""),
            (
                Writing(TOOL_CALLS, "", f"$name{ARGS}$arguments", TOOL_CALLS, needs=(ARGS,)),
                Writing(TOOL_CALLS, "[", OBJECT, ", ", "]"),
            ),
            short_ids=True,
        ),
        sections("deepseek_v3", DEEPSEEK, "function|$name\n```json\n$arguments\n```", "\n"),
        sections("deepseek_v31", DEEPSEEK, "$name|$arguments"),
        sections("kimi_k2", KIMI, "functions.$name:$number|$arguments"),
        CallFormat(
            "glm45",
            (TOOL_CALL, END_TOOL_CALL, PAIR.name, PAIR.name_end, PAIR.value, PAIR.end),
            partial(read_marked, [TOOL_CALL], partial(read_tagged_call, "", "", PAIR, END_TOOL_CALL), ""),
            (each_between(TOOL_CALL, "$name\n$pairs", END_TOOL_CALL),),
        ),
        CallFormat(
            HARMONY,
            (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
            read_harmony,
            (Writing("", "", HARMONY_CALL, None, other_calls=(CHANNEL_CALL,)),),
        ),
        json_list("granite", "<|tool_call|>"),
        json_list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
        json_list("jamba", "<tool_calls>", "</tool_calls>"),
        json_list("phi4_mini_json", "functools", written="functools["),  # the word alone begins no calls
        python_list("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
        CallFormat(
            "tgi",
            (),
            read_tgi,
            (Writing("", "", f'{{"{TGI_FUNCTION}": $arguments_with_name}}', None),),
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
