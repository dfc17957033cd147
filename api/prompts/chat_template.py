"""Chat template: renders messages as the text of a prompt, exactly as transformers' `apply_chat_template`
does.

A template is a program of the model's makers: it runs in Jinja's sandbox and sees only plain data.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from api.errors import ApiError, cut
from api.prompts.control_texts import private_text
from common.model_files import read_json
from common.settings.settings import SettingError

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
        tool_source = ""
        if isinstance(source, dict):
            tool_source = source.get("tool_use", "")
            source = source.get("default")
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


def token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens to which a tokenizer config gives names (`eos_token`): name → text. Each is a text there, or an
    object with its `content`.
    """
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in config.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and name.endswith("_token")}


def template_error(cause: str) -> ApiError:
    return ApiError(422, "template_error", cut(cause), "messages", "template_error")
