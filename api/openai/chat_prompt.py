"""The messages of a chat, checked, and the prompt that the model's template makes of them."""

from typing import Any

from api.errors import invalid
from api.inference.chat_template import OWN_VARIABLES, ChatTemplate, template_error
from api.offload import offload
from api.openai.request_schemas import ROLES, ChatMessage, ChatRequest, ContentPart

ROLES_OF_TOOLS = ("tool", "function")
FIELDS_OF_TOOLS = ("tool_calls", "tool_call_id", "function_call")
CHARS_OF_MESSAGE = 40
"""A message takes a template as long as it takes to tokenise so many characters."""


async def chat_prompt_text(body: ChatRequest, template: ChatTemplate | None) -> str:
    """As `rendered`, beside the streams where there are many messages."""
    return await offload(CHARS_OF_MESSAGE * len(body.messages), lambda: render_chat_prompt(body, template))


def render_chat_prompt(body: ChatRequest, template: ChatTemplate | None) -> str:
    """The text that the model goes on from. Where the last message is the assistant's, that is continued
    unless the client says otherwise.

    Raises ApiError (422): of `messages` or how they are to be used; `template_error`.
    """
    messages = [template_message(one, i) for i, one in enumerate(body.messages)]
    if not messages:
        raise invalid("`messages` cannot be empty", "messages")
    if template is None:
        raise template_error("this model has no chat template: use a route that takes a prompt")
    variables = body.chat_template_kwargs or {}
    for name in OWN_VARIABLES:
        if name in variables:
            raise invalid(f"`chat_template_kwargs` cannot have `{name}`", "chat_template_kwargs")
    if "developer" not in template.source:
        messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
    if continues_last_message(body):
        return template.render_open(messages, variables)
    return template.render(messages, body.add_generation_prompt is not False, variables)


def continues_last_message(body: ChatRequest) -> bool:
    """Whether the last message goes on. Raises ApiError where it is also to be followed by another."""
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            "continue_final_message",
        )
    if body.continue_final_message is not None:
        return body.continue_final_message
    return body.messages[-1].role == "assistant" and not body.add_generation_prompt


def echoed_message(body: ChatRequest) -> str:
    """What an answer repeats with `echo`: the message that it continues."""
    last = body.messages[-1]
    return join_parts(last.content, "") if body.echo and last.role == "assistant" else ""


def template_message(one: ChatMessage, i: int) -> dict[str, Any]:
    """As templates take it. Raises ApiError."""
    name = f"messages[{i}]"
    if one.role in ROLES_OF_TOOLS:
        raise invalid(f"`{name}.role`: `{one.role}` is not supported yet", f"{name}.role")
    if one.role not in ROLES:
        raise invalid(f"`{name}.role` must be one of {', '.join(ROLES)}. Given: {one.role!r}", f"{name}.role")
    for field in FIELDS_OF_TOOLS:
        if (one.model_extra or {}).get(field):
            raise invalid(f"`{name}.{field}` is not supported yet", f"{name}.{field}")
    named = {} if one.name is None else {"name": one.name}
    return {"role": one.role, "content": join_parts(one.content, f"{name}.content"), **named}


def join_parts(content: str | list[ContentPart] | None, name: str) -> str:
    """Content in parts is one text. Raises ApiError."""
    if content is None:
        raise invalid(f"`{name}` is required", name)
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text":
            raise invalid(f"`{name}[{i}]` is of type {part.type!r}: this model takes text only", name)
        if part.text is None:
            raise invalid(f"`{name}[{i}].text` is required", name)
    return "".join(part.text or "" for part in content)
