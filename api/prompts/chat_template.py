"""Chat template: renders messages as the text of a prompt, exactly as transformers' `apply_chat_template`
does. Texts of control tokens (`<|im_end|>`) that a client writes into messages stay text.

A template is a program of the model's makers: it runs in Jinja's sandbox and sees only plain data.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Encoding, Tokenizer

from api.errors import ApiError, cut, invalid
from common.model_files import read_json, token_texts
from common.settings.settings import SettingError

# --- control texts ------------------------------------------------------------------------------------------
# A chat template mixes the client's texts with its own control tokens, and its result does not show which is
# which. So each control text of a client gets a guard character inside before the template sees it: those
# without a guard are the template's. A copy of the tokenizer in which control tokens have other names
# (`PlainCopy`) tokenizes the prompt.


GUARDS = [chr(number) for number in range(0xE000, 0xF900)]
"""Private-use characters: they have no meaning, are no space, and survive every filter of a template."""
TAKEN_GUARD = re.compile(r"[\ue000-\uf8ff]|\\u[ef][0-9a-f]{3}")
"""One of GUARDS in a text, or as JSON and Python write it."""
PRIVATE = range(0x100000, 0x10FFFE)
"""Private-use characters."""


class Rendered(NamedTuple):
    """A prompt's text, with guards: a control text with a `guard` inside is a client's. Without a `guard` the
    client wrote none.
    """

    guarded: str
    guard: str = ""

    @property
    def text(self) -> str:
        """Without guards."""
        return self.guarded.replace(self.guard, "") if self.guard else self.guarded


class ControlTexts:
    """The texts of a model's control tokens.

    Attributes:
        starts: matches the first character of each control text.
        beginnings, ends: parts of control texts, of two characters at least: a template may join two of them.
        guards_all: whether every prompt is guarded, because the tokenizer's normalizer may make control
            tokens of other texts.
    """

    def __init__(self, texts: Iterable[str] = (), guards_all: bool = False) -> None:
        known = [text for text in texts if text]
        rests: dict[str, list[str]] = {}
        for text in known:
            rests.setdefault(text[0], []).append(text[1:])
        self.starts = re.compile(
            "|".join(
                f"{re.escape(first)}(?={'|'.join(map(re.escape, sorted(found)))})"
                for first, found in rests.items()
            )
            or "(?!)"
        )
        self.beginnings = {text[:length] for text in known for length in range(2, len(text))}
        self.ends = {text[-length:] for text in known for length in range(2, len(text))}
        self.longest = max(map(len, known), default=0)
        self.firsts = {text[0] for text in known}
        self.lasts = {text[-1] for text in known}
        self.guards_all = guards_all

    def guard_for(self, given: Any, template: str) -> str | None:
        """A guard that neither the client's texts nor the template contain; None if no text needs one. Raises
        ApiError.
        """
        texts = [*texts_of(given)]
        if not self.guards_all and not any(self.places(text) for text in texts):
            return None
        taken = {
            code.removeprefix("\\u") for text in (*texts, template) for code in TAKEN_GUARD.findall(text)
        }
        free = (guard for guard in GUARDS if guard not in taken and escaped(guard)[2:] not in taken)
        if (guard := next(free, None)) is None:
            raise invalid("`messages` has every private-use character: one must be left")
        return guard

    def guarded(self, given: Any, guard: str) -> Any:
        """A copy of a client's value with guards in its texts, keys included."""
        if isinstance(given, str):
            cuts = [0, *sorted(self.places(given)), len(given)]
            return guard.join(given[start:end] for start, end in pairwise(cuts))
        if isinstance(given, Mapping):
            return {self.guarded(key, guard): self.guarded(value, guard) for key, value in given.items()}
        if isinstance(given, list | tuple):
            return [self.guarded(one, guard) for one in given]
        return given

    def places(self, text: str) -> set[int]:
        """Where guards go: after the first character of each control text, and of each part of one at the
        beginning or end of the text, not counting white space.
        """
        found = {match.end() for match in self.starts.finditer(text)}
        stop = len(text.rstrip())
        tail = text[max(0, stop - self.longest) : stop]
        if not self.firsts.isdisjoint(tail):
            found |= {
                stop - length + 1 for length in range(2, len(tail) + 1) if tail[-length:] in self.beginnings
            }
        start = len(text) - len(text.lstrip())
        head = text[start : start + self.longest]
        if not self.lasts.isdisjoint(head) and any(
            head[:length] in self.ends for length in range(2, len(head) + 1)
        ):
            found.add(start + 1)
        return found


def control_texts(tokenizer: Tokenizer) -> ControlTexts:
    """The control texts of a tokenizer."""
    tokens = [one for one in tokenizer.get_added_tokens_decoder().values() if one.special]
    hides = tokenizer.normalizer is not None and any(token.normalized for token in tokens)
    return ControlTexts((token.content for token in tokens), guards_all=hides)


def texts_of(given: Any) -> Iterator[str]:
    """All texts in a client's value, keys included."""
    left = [given]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one


def rendered_text(text: str, guard: str | None) -> Rendered:
    """The prompt that a template made of guarded texts; it may have escaped guards as JSON and Python do."""
    if guard is None:
        return Rendered(text)
    return Rendered(text.replace(escaped(guard), guard), guard)


def escaped(guard: str) -> str:
    return f"\\u{ord(guard):04x}"


class PlainCopy:
    """A copy of a tokenizer in which each control token has another text, an alias of the same length.

    So control texts are ordinary text, and the library treats the template's control tokens as always: it
    normalizes, strips the spaces around a token, and adds what begins a prompt.

    Attributes:
        aliases: control token's id → alias.
        texts: control token's id → its text in the original.
    """

    def __init__(self, original: Tokenizer) -> None:
        self.original = original
        special = {i: token for i, token in original.get_added_tokens_decoder().items() if token.special}
        self.texts = {token_id: token.content for token_id, token in special.items() if token.content}
        firsts = secrets.SystemRandom().sample(PRIVATE, len(self.texts))  # no two aliases are alike
        self.aliases = {
            token_id: chr(first) + private_text(len(text) - 1)
            for first, (token_id, text) in zip(firsts, self.texts.items(), strict=True)
        }
        by_text = {text: self.aliases[token_id] for token_id, text in self.texts.items()}
        source = json.loads(original.to_str())
        self.tokenizer = Tokenizer.from_str(json.dumps(renamed(source, by_text, original)))

    def encode(self, prompt: Rendered, add_special_tokens: bool) -> Encoding:
        """The prompt's encoding; offsets are those of its text without guards. Raises ApiError."""
        text = self.aliased(prompt)
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def aliased(self, prompt: Rendered) -> str:
        """The prompt's text without guards, and with aliases in place of the template's control tokens.
        Raises ApiError.
        """
        parts = prompt.guarded.split(prompt.guard)
        text, guards = "".join(parts), [*accumulate(map(len, parts))][:-1]
        if any(alias in text for alias in self.aliases.values()):
            raise invalid("`messages` has private-use characters that are reserved here")
        pieces, done = [], 0
        for token_id, start, end in self.control_tokens(text):
            if bisect_right(guards, start) == bisect_right(guards, end):  # none of it is a client's
                pieces += [text[done:start], self.aliases[token_id]]
                done = end
        return "".join([*pieces, text[done:]])

    def control_tokens(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(id, start, end) of the control tokens that the original finds in a text, without the spaces that
        they strip.
        """
        encoding = self.original.encode_batch([text], add_special_tokens=False)[0]
        for index, token_id in enumerate(encoding.ids):
            span = encoding.token_to_chars(index) if token_id in self.texts else None
            if span is not None:
                found = text[span[0] : span[1]]
                own = self.texts[token_id] if self.texts[token_id] in found else found.strip()
                start = span[0] + found.index(own)
                yield token_id, start, start + len(own)


def private_text(length: int) -> str:
    """A text of private-use characters that were drawn at random: no client can guess it."""
    return "".join(chr(secrets.choice(PRIVATE)) for _ in range(length))


def renamed(source: dict[str, Any], aliases: dict[str, str], original: Tokenizer) -> dict[str, Any]:
    """A tokenizer.json with aliases in place of control texts, also in the model's vocabulary: the model
    would find them there.
    """
    for token in source["added_tokens"]:
        alias = aliases.get(token["content"], "")
        if alias:
            kept = original.normalizer is None or alias in original.normalizer.normalize_str(alias)
            token |= {"content": alias, "special": False, "normalized": token["normalized"] and kept}
    model = source["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {aliases.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[aliases.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    return source


# --- chats --------------------------------------------------------------------------------------------------


Message = Mapping[str, Any]
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that every template gets; a client's own variables have other names."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the last message's content; with a space, which a template that trims content removes."""
ARGUMENTS = {"place": "Rome"}
PROBE = "a probe of contents"
PICTURE = private_text(8)
"""Marks a picture within a message's content, until the template takes it: so all that joins and moves texts
moves pictures, too.
"""

# --- environment --------------------------------------------------------------------------------------------


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja with the filters and functions that templates expect."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    jinja.filters["tojson"] = tojson
    jinja.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": Dict(),
        "namespace": Variables,
    }
    return jinja


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON; unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(text: str) -> NoReturn:
    raise TemplateError(text)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class Generation(Extension):
    """`{% generation %}`, which marks an assistant's text for training: its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  # the library's own type

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Dict:
    """`dict(…)` as a function: attributes of the class would lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Variables(Namespace):
    """`namespace(…)` that refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be among the names
        values = dict(*args[1:], **kwargs)
        for name in values:
            check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: str) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}")


# --- template -----------------------------------------------------------------------------------------------


class ChatTemplate:
    """A template and its variables `bos_token`, `eos_token`, …

    Attributes:
        inline: what stands for a picture in a text of this model; None for models that see none.
        for_tools: the template of requests with tools; by default the same one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str = "",
        inline: str | None = None,
    ) -> None:
        self.source = source
        self.special_tokens = special_tokens
        self.inline = inline
        other = ChatTemplate(tool_source, special_tokens, inline=inline) if tool_source else None
        self.for_tools = other or self

    @classmethod
    def load(
        cls,
        path: Path,
        config_path: str | None = None,
        own_path: str | None = None,
        inline: str | None = None,
    ) -> "ChatTemplate | None":
        """Load the template at `own_path`, else that of the tokenizer config at `config_path`, else that of
        the model in the directory `path`, if any. Raises SettingError.
        """
        other = read_tokenizer_config(Path(config_path)) if config_path else {}
        config = read_json(path / "tokenizer_config.json") | other
        file = path / "chat_template.jinja"
        own = (
            (file.read_text(encoding="utf-8") if file.is_file() else None)
            or read_json(path / "chat_template.json").get("chat_template")
            or config.get("chat_template")
        )
        source = read_template(Path(own_path)) if own_path else other.get("chat_template", own)
        if isinstance(source, list):
            source = {template["name"]: template["template"] for template in source}
        tool_source, more = "", path / "additional_chat_templates/tool_use.jinja"
        if isinstance(source, dict):
            tool_source = source.get("tool_use", "")
            source = source.get("default")
        elif source == own and more.is_file():
            tool_source = more.read_text(encoding="utf-8")
        special = {name: text for name, text in token_texts(config).items() if name in SPECIAL_TOKENS}
        return cls(source, special, tool_source, inline) if source else None

    @cached_property
    def compiled(self) -> Template:
        return environment().from_string(self.source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set."""
        return frozenset(meta.find_undeclared_variables(environment().parse(self.source)))

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.variables

    @cached_property
    def wants_text_arguments(self) -> bool:
        """Whether arguments of earlier calls must be JSON texts, because the template refuses objects or
        writes them as Python does.
        """
        shown = self.tried(self.show, earlier_call(ARGUMENTS))
        if shown is not None:
            return str(ARGUMENTS) in shown
        return self.tried(self.show, earlier_call(json.dumps(ARGUMENTS))) is not None

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a content may be a list of parts, of which `{"type": "image"}` is a picture."""
        picture, text = {"type": "image"}, {"type": "text", "text": PROBE}
        shown, alone = (self.tried(self.fill, probe_chat([*parts, text])) for parts in ([picture], []))
        return PROBE in (shown or "") and f"'{PROBE}'" not in (shown or "") and alone not in (None, shown)

    @cached_property
    def takes_system(self) -> bool:
        """Whether the first message may be the system's."""
        chat = [{"role": "system", "content": PROBE}, *probe_chat("?")]
        return PROBE in (self.tried(self.show, chat) or "")

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether later messages may be the system's, too; a template may count them as the assistant's."""
        turns = [("system", "?"), ("user", "?"), ("system", PROBE), ("assistant", "?"), ("user", "?")]
        chat = [{"role": role, "content": content} for role, content in turns]
        return PROBE in (self.tried(self.show, chat) or "")

    @cached_property
    def takes_users_in_a_row(self) -> bool:
        """Whether a user's message may follow another one."""
        return PROBE in (self.tried(self.show, [*probe_chat("?"), *probe_chat(PROBE)]) or "")

    @cached_property
    def takes_texts(self) -> bool:
        """Whether a content may be a text."""
        return PROBE in (self.tried(self.fill, probe_chat(PROBE)) or "")

    def tried(self, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str | None:
        """What comes of messages; None if the template refuses them."""
        try:
            return render(messages)
        except ApiError:
            return None

    def show(self, messages: Sequence[Message]) -> str:
        return self.render(messages, False, {})

    def with_pictures(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages as the template of a model that sees takes them."""
        if not self.takes_parts:
            return [in_text(one, self.inline or "") for one in messages]
        return [in_parts(one, always=not self.takes_texts) for one in messages]

    def fill(self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})) -> str:
        """What the template makes of messages as they are. Raises ApiError."""
        own = {"tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self.compiled.render({**self.special_tokens, **own, **variables, "messages": messages})
        except Exception as error:  # a template may raise anything
            raise template_error(str(error) or type(error).__name__) from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt up to the start of the next message; with `add_generation_prompt` up to the start of its
        content. Raises ApiError.
        """
        shaped = messages if self.inline is None else self.with_pictures(messages)
        own = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        return self.fill(shaped, {**variables, **own})

    def render_open(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt up to the end of the last message's content: the model continues it. Raises ApiError."""
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + END_MARK}]
        rendered = self.render(marked, False, variables, tools)
        text, mark, rest = rendered.rpartition(END_MARK.strip())
        if not mark or last["content"].strip() not in text:
            raise template_error("the chat template changes the last message, so it cannot be continued")
        return text if rest.startswith(" ") else text.rstrip()


# --- pictures -----------------------------------------------------------------------------------------------


def parts_of(content: str) -> Iterator[dict[str, str]]:
    """A content in the parts that templates know."""
    first, *others = content.split(PICTURE)
    if first or not others:
        yield {"type": "text", "text": first}
    for text in others:
        yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def in_parts(message: Mapping[str, Any], always: bool) -> Mapping[str, Any]:
    """A message with its content in parts where it has pictures, or `always`."""
    content = message.get("content")
    if not isinstance(content, str) or not (always or PICTURE in content):
        return message
    return {**message, "content": [*parts_of(content)]}


def in_text(message: Mapping[str, Any], inline: str) -> Mapping[str, Any]:
    """A message with a model's own text for each picture."""
    content = message.get("content")
    if not isinstance(content, str) or PICTURE not in content:
        return message
    return {**message, "content": content.replace(PICTURE, inline)}


# --- probes -------------------------------------------------------------------------------------------------


def probe_chat(content: Any) -> list[Message]:
    """A chat of one message."""
    return [{"role": "user", "content": content}]


def earlier_call(arguments: Any) -> list[Message]:
    """A chat in which the assistant called a tool with these arguments."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "!", "tool_call_id": "call00001"},
    ]


# --- files --------------------------------------------------------------------------------------------------


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Read TOKENIZER_CONFIG_PATH. Raises SettingError if it has no chat template."""
    config = read_json(path)
    if not config.get("chat_template"):
        cause = "has no chat_template" if path.is_file() else "does not exist"
        raise SettingError("tokenizer_config_path", f"{path} {cause}")
    return config


def read_template(path: Path) -> str:
    """Read CHAT_TEMPLATE. Raises SettingError if it is no template."""
    try:
        source = path.read_text(encoding="utf-8")
        environment().parse(source)
    except (OSError, ValueError, TemplateError) as error:
        raise SettingError("chat_template", f"{path} is no chat template: {error}") from error
    return source


def template_error(cause: str) -> ApiError:
    return ApiError(422, "template_error", cut(cause), "messages", "template_error")
