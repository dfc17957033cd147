"""Formats of calls and reasoning: how a model writes them, and what shows that it does.

Their names are those of TOOL_CALL_PARSER and REASONING_PARSER.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from api.answers.call_readers import (
    ARGS,
    CALL_ID,
    CHANNEL,
    CONSTRAIN,
    DEEPSEEK,
    END_FUNCTION,
    END_TOOL_CALL,
    ENDS,
    FENCE,
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
OTHER_THINKING = ("<response>", "<|channel|>")
"""Texts of templates that mean something else by `<think>`, or whose format of calls has the thinking."""
Signs = Sequence[tuple[str, ...]]
"""Texts that show a format if all texts of one of the groups stand in the model's template."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model thinks: between two marks at the beginning of its answer.

    Attributes:
        always: an answer begins with thinking, even without the first mark.
        signs, is_token: as of a format of calls.
    """

    name: str
    open: str
    close: str
    signs: Signs = ()
    always: bool = False
    is_token: bool = False

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
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", (("[THINK]",),)),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", (("<seed:think>",),)),
        ReasoningFormat("glm45", *THINK, (("<think>", "<arg_key>"),)),
        ReasoningFormat("kimi_k2", *THINK, (("<think>", "<|tool_call_begin|>"),)),
        ReasoningFormat("deepseek_v3", *THINK, (("</think>", "<｜Assistant｜>", "thinking"),)),
        ReasoningFormat("deepseek_r1", *THINK, (("</think>", "<｜Assistant｜>"),), always=True),
        ReasoningFormat("qwen3", *THINK, (("<think>",), ("</think>",))),
        ReasoningFormat("hunyuan_a13b", *THINK),
        ReasoningFormat("holo2", *THINK),
        ReasoningFormat("minimax_m2", *THINK, always=True),
        ReasoningFormat("ernie45", *THINK),
        ReasoningFormat("nemotron_v3", *THINK),
    )
}
"""By name. A model's format is the first whose signs it shows."""


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
        signs: what shows in a template that the model writes calls so.
        is_token: the first sign shows it in the vocabulary, too, where the template does not.
        short_ids: the model's template takes ids of calls of 9 letters and digits.
        unmarked: what a call without a mark begins with.
        heads: how an object that is such a call begins, as models space it; `%s` is its function's name in
            quotes.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Scanner], Scan]
    writings: tuple[Writing, ...]
    signs: Signs = ()
    is_token: bool = False
    short_ids: bool = False
    unmarked: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def writing(self, special: Container[str]) -> Writing:
        """How a model with these special tokens writes calls."""
        return next(one for one in self.writings if all(mark in special for mark in one.needs))


LFM2_SIGNS = (("<|tool_call_start|>",), ("<|tool_list_start|>",))
LLAMA4_SIGNS = (("func_name1(", "<|header_start|>"),)
SEP = DEEPSEEK.arguments_begin
HARMONY_CALL = f" to={FUNCTIONS}$name{CHANNEL}commentary json{MESSAGE}$arguments"
CHANNEL_CALL = f"{CHANNEL}commentary to={FUNCTIONS}$name {CONSTRAIN}json{MESSAGE}$arguments"
Format = TypeVar("Format", CallFormat, ReasoningFormat)
OBJECT = '{"name": "$name", "arguments": $arguments}'


def each_between(open: str, call: str, close: str) -> Writing:
    """Each call stands between two marks, and on lines of its own."""
    return Writing(open, "", call, f"{close}\n{open}", close)


def json_list(name: str, open: str, close: str = "", written: str = "") -> CallFormat:
    """A list of objects between two marks; some formats have no second mark."""
    marks = tuple(mark for mark in (open, close) if mark)
    writing = Writing(written or open, "" if written else "[", OBJECT, ", ", f"]{close}")
    return CallFormat(
        name, marks, partial(read_marked, [open], read_calls, marks[1:]), (writing,), ((open,),)
    )


def python_list(name: str, open: str, close: str, signs: Signs) -> CallFormat:
    """A list of calls as in Python; where the marks around it are no special tokens, it has none."""
    marks = tuple(mark for mark in (open, close) if mark)
    plain = Writing("", "[", "$name($keywords)", ", ", "]")
    marked = replace(plain, mark=open, close=f"]{close}", needs=(open, close))
    writings = (marked, plain) if close else (plain,)
    read = partial(read_lines, read_python_list, open, marks[1:], "\n[", "")
    return CallFormat(name, marks, read, writings, signs, unmarked=("[",))


def functions_between(name: str, open: str, close: str, *signs: str) -> CallFormat:
    """Functions with their parameters in tags, between two marks, which the model may leave out."""
    read_one = partial(read_tagged_call, FUNCTION, ">", PARAMETER, END_FUNCTION)
    writing = each_between(open, f"\n{FUNCTION}$name>\n$parameters{END_FUNCTION}\n", close)
    read = partial(read_marked, [open, FUNCTION], read_one, [close])
    return CallFormat(name, (open, close), read, (writing,), (signs,), unmarked=(FUNCTION,))


def sections(
    name: str, marks: SectionMarks, call: str, between: str, *signs: str, is_token: bool = False
) -> CallFormat:
    """A section of calls, each between two marks. `|` in the call is the mark before its arguments."""
    one = f"{marks.call_begin}{call.replace('|', marks.arguments_begin)}{marks.call_end}"
    writing = Writing(marks.calls_begin, "", one, between, marks.calls_end)
    ends = (FENCE, marks.call_end, marks.calls_end)
    read = partial(read_marked, [marks.calls_begin, marks.call_begin], partial(read_section, marks), ends)
    return CallFormat(name, marks, read, (writing,), (signs,), is_token)


CALL_FORMATS = {
    form.name: form
    for form in (
        CallFormat(
            HARMONY,
            (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
            read_harmony,
            (Writing("", "", HARMONY_CALL, None, other_calls=(CHANNEL_CALL,)),),
            ((CHANNEL,),),
            is_token=True,
        ),
        sections("kimi_k2", KIMI, "functions.$name:$number|$arguments", "", KIMI.call_begin, is_token=True),
        sections("deepseek_v3", DEEPSEEK, "function|$name\n```json\n$arguments\n```", "\n", SEP, "```json"),
        sections("deepseek_v31", DEEPSEEK, "$name|$arguments", "", SEP, is_token=True),
        CallFormat(
            "glm45",
            (TOOL_CALL, END_TOOL_CALL, PAIR.name, PAIR.name_end, PAIR.value, PAIR.end),
            partial(read_marked, [TOOL_CALL], partial(read_tagged_call, "", "", PAIR, END_TOOL_CALL), []),
            (each_between(TOOL_CALL, "$name\n$pairs", END_TOOL_CALL),),
            ((PAIR.name,),),
            is_token=True,
        ),
        functions_between("seed_oss", "<seed:tool_call>", "</seed:tool_call>", "<seed:tool_call>"),
        functions_between("qwen3_coder", TOOL_CALL, END_TOOL_CALL, FUNCTION, PARAMETER.name),
        python_list("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", LFM2_SIGNS),
        json_list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
        json_list("granite", "<|tool_call|>"),
        json_list("jamba", "<tool_calls>", "</tool_calls>"),
        json_list("phi4_mini_json", "functools", written="functools["),  # the word alone begins no calls
        CallFormat(
            "hermes",
            (TOOL_CALL, END_TOOL_CALL),
            partial(read_marked, [TOOL_CALL], read_calls, [END_TOOL_CALL]),
            (each_between(TOOL_CALL, f"\n{OBJECT}\n", END_TOOL_CALL),),
            ((TOOL_CALL,),),
        ),
        CallFormat(
            "mistral",
            (TOOL_CALLS, CALL_ID, ARGS),
            partial(read_marked, [TOOL_CALLS], read_mistral, []),
            (
                Writing(TOOL_CALLS, "", f"$name{ARGS}$arguments", TOOL_CALLS, needs=(ARGS,)),
                Writing(TOOL_CALLS, "[", OBJECT, ", ", "]"),
            ),
            ((TOOL_CALLS,),),
            is_token=True,
            short_ids=True,
        ),
        python_list("llama4_pythonic", "<|python_start|>", "<|python_end|>", LLAMA4_SIGNS),
        python_list("pythonic", "<|python_tag|>", "", (("func_name1(",),)),
        CallFormat(
            "llama3_json",
            (PYTHON_TAG,),
            partial(read_lines, read_call, PYTHON_TAG, [], "\n{", ";"),
            (Writing("", "", '{"name": "$name", "parameters": $arguments}', "; ", may_open=PYTHON_TAG),),
            (('"parameters": ', "ipython"),),
            unmarked=("{",),
            heads=('{"name": %s, "parameters": {', '{"name":%s,"parameters":{'),
        ),
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
"""By name; a model's format is the first whose signs it shows. vLLM has neither `lfm2` nor `tgi`: this is for
models without a format of their own.
"""
CALL_FORMAT_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "glm47": "glm45",
    "llama4": "llama4_pythonic",
}
"""Other names of call formats, in vLLM and SGLang."""


def find_call_format(template: str, id_of: Callable[[str], int | None]) -> CallFormat | None:
    """The format in which a model writes calls; None if its template has no tools, or another format."""
    return find_format(CALL_FORMATS.values(), template, id_of) if "tools" in template else None


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format in which a model thinks; None if it does not, or if its format of calls has the thinking."""
    if any(text in template for text in OTHER_THINKING):
        return None
    return find_format(REASONING_FORMATS.values(), template, lambda _: None)


def find_format(
    formats: Iterable[Format], template: str, id_of: Callable[[str], int | None]
) -> Format | None:
    """The first format whose signs are in the template or in the vocabulary."""
    for form in formats:
        if any(all(text in template for text in texts) for texts in form.signs):
            return form
        if form.is_token and id_of(form.signs[0][0]) is not None:
            return form
    return None
