"""Formats of calls and reasoning: how a model writes them, and what shows that it does.

Their names are those of TOOL_CALL_PARSER and REASONING_PARSER.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from api.answers.scanner import SPACE

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
        signs: as of a format of calls.
    """

    name: str
    open: str
    close: str
    signs: Signs = ()
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


# --- calls --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Writing:
    """How calls are written, by a model of which a grammar forces them, or of which they are read.

    In `call`, `$name` is the function's name, and `$id` that with the call's number, as Kimi has it. The
    arguments are `$arguments` as a JSON object, `$parameters` and `$pairs` between tags, `$keywords` as in
    Python. `$call_id` is only read.

    Attributes:
        mark: after this text, wherever it stands, calls follow; "" if they can only begin an answer.
        open: what stands between the mark and the first call.
        call: one call.
        between: what stands between two calls; None if there may be only one.
        close: what stands after the last call.
        needs: marks that must be special tokens; with others the model writes calls in another way.
    """

    mark: str
    open: str
    call: str
    between: str | None
    close: str = ""
    needs: tuple[str, ...] = ()

    @property
    def separator(self) -> str:
        """What stands between two calls, if it is no mark."""
        between = (self.between or "").strip()
        return between if between in (",", ";") else ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        name: vLLM's name of its parser.
        marks: texts in which calls begin, end, or are divided. Where one is a special token of the model, its
            text must be among what the parser is fed.
        writings: all are read; a grammar forces the first that the model's special tokens allow.
        signs: what shows in a template that the model writes calls so.
        is_token: the first sign shows it in the vocabulary, too, where the template does not.
        short_ids: the model's template takes ids of calls of 9 letters and digits.
        unmarked: what a call without a mark begins with; a bracket only at the beginning of the answer or of
            a line, and for functions that the request offers.
        keys: those of an object that is such a call.
    """

    name: str
    marks: tuple[str, ...]
    writings: tuple[Writing, ...]
    signs: Signs = ()
    is_token: bool = False
    short_ids: bool = False
    unmarked: str = ""
    keys: tuple[str, ...] = ()

    def writing(self, special: Container[str]) -> Writing:
        """How a model with these special tokens writes calls."""
        return next(one for one in self.writings if all(mark in special for mark in one.needs))

    @property
    def begins_lines(self) -> bool:
        return self.unmarked in ("{", "[")

    @property
    def starts(self) -> tuple[str, ...]:
        """Texts with which a call without a mark begins, wherever they stand."""
        return (f"\n{self.unmarked}" if self.begins_lines else self.unmarked,) if self.unmarked else ()


class ArgumentTags(NamedTuple):
    """What stands around the name of an argument and its value.

    Attributes:
        name_end: follows the name.
        value: follows `name_end`, after white space; "" if the value follows at once.
        line: what else divides tags and value, where the model writes it.
        untyped: the types of a parameter for which the schema says none.
    """

    name: str
    name_end: str
    value: str
    end: str
    line: str = ""
    untyped: frozenset[str] = frozenset()


PARAMETER = ArgumentTags("<parameter=", ">", "", "</parameter>", "\n", frozenset(["string"]))
PAIR = ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FUNCTIONS = "functions."
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_CALL = f" to={FUNCTIONS}$name{CHANNEL}commentary json{MESSAGE}$arguments"
CHANNEL_CALL = f"{CHANNEL}commentary to={FUNCTIONS}$name {CONSTRAIN}json{MESSAGE}$arguments"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
"""The marks around all calls, around one, and before its arguments: first, last, and those between."""
LFM2_SIGNS = (("<|tool_call_start|>",), ("<|tool_list_start|>",))
LLAMA4_SIGNS = (("func_name1(", "<|header_start|>"),)
OBJECT = '{"name": "$name", "arguments": $arguments}'


def each_between(open: str, call: str, close: str) -> Writing:
    """Each call stands between two marks, and on lines of its own."""
    return Writing(open, "", f"{call}{close}", f"\n{open}")


def list_of(open: str, call: str, close: str = "") -> Writing:
    """A list of calls between two marks."""
    return Writing(open, "[", call, ", ", f"]{close}")


def json_list(name: str, open: str, close: str = "") -> CallFormat:
    """A list of objects between two marks; some formats have no second mark."""
    marks = tuple(mark for mark in (open, close) if mark)
    return CallFormat(name, marks, (list_of(open, OBJECT, close),), ((open,),))


def python_list(name: str, open: str, close: str, signs: Signs) -> CallFormat:
    """A list of calls as in Python; where the marks around it are no special tokens, it has none."""
    marks = tuple(mark for mark in (open, close) if mark)
    plain = list_of("", "$name($keywords)")
    marked = replace(plain, mark=open, close=f"]{close}", needs=marks)
    return CallFormat(name, marks, (marked, plain) if close else (plain, marked), signs, unmarked="[")


def functions_between(name: str, open: str, close: str, *signs: str) -> CallFormat:
    """Functions with their parameters in tags, between two marks, which the model may leave out."""
    writing = each_between(open, f"\n{FUNCTION}$name>\n$parameters{END_FUNCTION}\n", close)
    return CallFormat(name, (open, close), (writing,), (signs,), unmarked=FUNCTION)


def section(marks: Sequence[str], call: str, between: str = "") -> Writing:
    """A section of calls, each between two marks. `|` in the call is the mark before its arguments."""
    one = f"{marks[1]}{call.replace('|', marks[2])}{marks[3]}"
    return Writing(marks[0], "", one, between, marks[4])


KIMI_CALLS = section(KIMI, "$id|$arguments")
V3_CALLS = section(DEEPSEEK, "function|$name\n```json\n$arguments\n```", "\n")
V31_CALLS = section(DEEPSEEK, "$name|$arguments")
LLAMA_KEYS = ("name", "parameters")
LLAMA_CALLS = Writing("", "", '{"name": "$name", "parameters": $arguments}', "; ")
CALL_FORMATS = {
    form.name: form
    for form in (
        CallFormat(
            HARMONY,
            (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
            (Writing("", "", HARMONY_CALL, None), Writing("", "", CHANNEL_CALL, None)),
            ((CHANNEL,),),
            is_token=True,
        ),
        CallFormat("kimi_k2", KIMI, (KIMI_CALLS,), ((KIMI[1],),), is_token=True, unmarked=KIMI[1]),
        CallFormat(
            "deepseek_v3",
            DEEPSEEK,
            (V3_CALLS, V31_CALLS),
            ((DEEPSEEK[2], "```json"),),
            unmarked=DEEPSEEK[1],
        ),
        CallFormat(
            "deepseek_v31",
            DEEPSEEK,
            (V31_CALLS, V3_CALLS),
            ((DEEPSEEK[2],),),
            is_token=True,
            unmarked=DEEPSEEK[1],
        ),
        CallFormat(
            "glm45",
            (TOOL_CALL, END_TOOL_CALL, PAIR.name, PAIR.name_end, PAIR.value, PAIR.end),
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
        CallFormat(
            "phi4_mini_json",
            ("functools[",),  # the word alone begins no calls
            (Writing("functools[", "", OBJECT, ", ", "]"),),
            (("functools",),),
        ),
        CallFormat(
            "hermes",
            (TOOL_CALL, END_TOOL_CALL),
            (
                each_between(TOOL_CALL, f"\n{OBJECT}\n", END_TOOL_CALL),
                list_of(TOOL_CALL, OBJECT, END_TOOL_CALL),
            ),
            ((TOOL_CALL,),),
        ),
        CallFormat(
            "mistral",
            (TOOL_CALLS, CALL_ID, ARGS),
            (
                Writing(TOOL_CALLS, "", f"$name{ARGS}$arguments", TOOL_CALLS, needs=(ARGS,)),
                list_of(TOOL_CALLS, OBJECT),
                Writing(TOOL_CALLS, "", f"$name{CALL_ID}$call_id{ARGS}$arguments", TOOL_CALLS),
                Writing(TOOL_CALLS, "", "$name$arguments", TOOL_CALLS),
            ),
            ((TOOL_CALLS,),),
            is_token=True,
            short_ids=True,
        ),
        python_list("llama4_pythonic", "<|python_start|>", "<|python_end|>", LLAMA4_SIGNS),
        python_list("pythonic", PYTHON_TAG, "", (("func_name1(",),)),
        CallFormat(
            "llama3_json",
            (PYTHON_TAG,),
            (LLAMA_CALLS, replace(LLAMA_CALLS, mark=PYTHON_TAG)),
            (('"parameters": ', "ipython"),),
            unmarked="{",
            keys=LLAMA_KEYS,
        ),
        CallFormat("tgi", (), (replace(LLAMA_CALLS, between=None),), unmarked="{", keys=LLAMA_KEYS),
    )
}
"""By name; a model's format is the first whose signs it shows. vLLM has neither `lfm2` nor `tgi`: this is for
models without a format of their own, which TGI's prompt asks for such objects.
"""
CALL_FORMAT_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "glm47": "glm45",
    "llama4": "llama4_pythonic",
}
"""Other names of call formats, in vLLM and SGLang."""


def find_call_format(template: str, id_of: Callable[[str], int | None]) -> CallFormat | None:
    """The format in which a model writes calls: the first whose signs are in its template or its vocabulary;
    None if its template has no tools, or another format.
    """
    if "tools" not in template:
        return None
    for form in CALL_FORMATS.values():
        if is_signed(template, form.signs) or (form.is_token and id_of(form.signs[0][0]) is not None):
            return form
    return None


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format in which a model thinks; None if it does not, or if its format of calls has the thinking."""
    if any(text in template for text in OTHER_THINKING):
        return None
    return next((form for form in REASONING_FORMATS.values() if is_signed(template, form.signs)), None)


def is_signed(template: str, signs: Signs) -> bool:
    return any(all(text in template for text in texts) for texts in signs)
