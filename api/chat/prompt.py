"""Prompt: a chat's messages and tools, rendered by the model's chat template.

A model whose template has no tools gets them as text-generation-inference puts them: as text at the end of
the last message.
"""

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.chat.tools import ToolChoice
from api.errors import invalid, quoted
from api.prompt_text.control_texts import ControlTexts, Rendered, rendered_text
from api.templates.chat_template import OWN_VARIABLES, ChatTemplate, template_error

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
TOOL_PROMPT = (
    "Given the functions available, please respond with a JSON for a function call with its proper arguments "
    "that best answers the given prompt. Respond in the format {name: function name, parameters: dictionary "
    "of argument name and its value}.Do not use variables."
)
"""TGI's own, to the letter."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a prompt is rendered from.

    Attributes:
        messages: as `template_messages` makes them.
        tools: None where none may be called.
        tool_prompt: text behind the tools; TGI's field.
        variables: a client's own ones, for the template.
        add_generation_prompt: whether the prompt ends with the beginning of the next message.
        continues_final_message: the last message is continued.
    """

    messages: Sequence[Message]
    tools: ToolChoice | None = None
    tool_prompt: str | None = None
    variables: Mapping[str, Any]
    add_generation_prompt: bool = True
    continues_final_message: bool = False


def render_prompt(chat: Chat, template: ChatTemplate | None, controls: ControlTexts) -> Rendered:
    """The text that the model continues. Raises ApiError (422) for errors of the template, too."""
    if not chat.messages:
        raise invalid("`messages` cannot be empty", "messages")
    if template is None:
        raise template_error("this model has no chat template: use /v1/completions or /generate")
    for name in OWN_VARIABLES:
        if name in chat.variables:
            raise invalid(f"`chat_template_kwargs` cannot have `{name}`", "chat_template_kwargs")
    messages: Sequence[Message] = chat.messages
    if "developer" not in template.source:
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    if chat.tools is not None:
        template = template.for_tools
    messages = known_calls(messages, template)
    tools = None
    if chat.tools is not None:
        messages = [*messages]
        place = last_place(messages)
        text = tool_text(chat.tools, chat.tool_prompt, template.takes_tools)
        messages[place] = {**messages[place], "content": messages[place]["content"] + text}
        tools = chat.tools.tools if template.takes_tools else None
    variables, guard = chat.variables, controls.guard_for([messages, chat.variables, tools], template.source)
    if guard is not None:
        try:
            messages, variables, tools = controls.guarded([messages, variables, tools], guard)
        except RecursionError as error:
            raise template_error("the messages are nested too deeply") from error
    if chat.continues_final_message:
        return rendered_text(template.render_open(messages, variables, tools), guard)
    return rendered_text(template.render(messages, chat.add_generation_prompt, variables, tools), guard)


def tool_text(choice: ToolChoice, tool_prompt: str | None, template_has_tools: bool) -> str:
    """What TGI adds to the last message."""
    if template_has_tools:
        return f"\n---\n{tool_prompt}" if tool_prompt else ""
    note_missing_tools()
    tools = json.dumps(choice.tools, ensure_ascii=False, separators=(",", ":"))
    return f"\n---\n{tools}\n{tool_prompt or TOOL_PROMPT}"


@functools.cache
def note_missing_tools() -> None:
    log.warning("the chat template has no tools: the prompt has them as text, behind the last message")


def last_place(messages: Sequence[Message]) -> int:
    """The last message that is not the assistant's; the last one, if all are."""
    places = [i for i, one in enumerate(messages) if one["role"] != "assistant"]
    return places[-1] if places else len(messages) - 1


# --- earlier calls ------------------------------------------------------------------------------------------


def known_calls(messages: Sequence[Message], template: ChatTemplate) -> Sequence[Message]:
    """Messages whose calls and results are in a form that the template knows."""
    if not any("tool_calls" in one or one["role"] == "tool" for one in messages):
        return messages
    if "tool_calls" not in template.source:
        return join_results([plain_message(one) for one in messages])
    if template.wants_text_arguments:
        return [
            {**one, "tool_calls": [text_call(call) for call in one["tool_calls"]]}
            if "tool_calls" in one
            else one
            for one in messages
        ]
    return messages


def text_call(call: Message) -> Message:
    """A call with arguments that are a JSON text."""
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def plain_message(message: Message) -> Message:
    """A message for a template without calls: each is a line of JSON, as TOOL_PROMPT asks for it; a result
    comes from the user.
    """
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"], "is_result": True}
    calls = [
        json.dumps({"name": called["name"], "parameters": called["arguments"]}, ensure_ascii=False)
        for called in (one["function"] for one in message.get("tool_calls", []))
    ]
    lines = [message["content"]] * bool(message["content"]) + calls
    return {**message, "content": "\n".join(lines)} if calls else message


def join_results(messages: Sequence[Message]) -> list[Message]:
    """Results in a row are one message: templates expect user and assistant in turns."""
    joined: list[Message] = []
    for one in messages:
        if joined and "is_result" in one and "is_result" in joined[-1]:
            joined[-1] = {**one, "content": joined[-1]["content"] + "\n" + one["content"]}
        else:
            joined.append(one)
    return joined


# --- reasoning ----------------------------------------------------------------------------------------------


def reasoning_variables(
    effort: str | None, variables: Mapping[str, Any], template: ChatTemplate | None
) -> dict[str, Any]:
    """A client's variables, with those that its `reasoning_effort` gives a value. Raises ApiError."""
    known = template.variables if template else frozenset()
    if effort is None:
        return dict(variables)
    if effort not in EFFORTS:
        raise invalid(
            f"`reasoning_effort` must be one of {', '.join(EFFORTS)}. Given: {quoted(effort)}",
            "reasoning_effort",
        )
    values = {"reasoning_effort": effort} | dict.fromkeys(SWITCHES, effort != "none")
    return {name: value for name, value in values.items() if name in known} | dict(variables)
