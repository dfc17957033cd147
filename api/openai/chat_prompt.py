"""Chat prompts: the messages of a chat are checked, and rendered by the model's chat template."""

from typing import Any

from api.errors import invalid
from api.offload import offload
from api.openai.request_schemas import ROLES, ChatMessage, ChatRequest, ContentPart
from api.templates.chat_template import OWN_VARIABLES, ChatTemplate, template_error

ROLES_OF_TOOLS = ("tool", "function")
FIELDS_OF_TOOLS = ("tool_calls", "tool_call_id", "function_call")
CHARS_OF_MESSAGE = 40
"""To render one message takes about as long as to tokenize so many characters."""


async def chat_prompt_text(body: ChatRequest, template: ChatTemplate | None) -> str:
    """As `rendered`, beside the streams where there are many messages."""
    return await offload(CHARS_OF_MESSAGE * len(body.messages), lambda: render_chat_prompt(body, template))


def render_chat_prompt(body: ChatRequest, template: ChatTemplate | None) -> str:
    """The text that the model continues. If the last message is the assistant's, the model continues that
    message, unless the client says otherwise.

    Raises ApiError (422) for invalid messages, and for errors of the template.
    """
    messages = [template_message(one, i) for i, one in enumerate(body.messages)]
    if not messages:
        raise invalid("`messages` cannot be empty", "messages")
    if template is None:
        raise template_error("this model has no chat template: use /v1/completions or /generate")
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
    """Whether the model continues the last message. Raises ApiError for contradicting fields."""
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            "continue_final_message",
        )
    if body.continue_final_message is not None:
        return body.continue_final_message
    return body.messages[-1].role == "assistant" and not body.add_generation_prompt


def echoed_message(body: ChatRequest) -> str:
    """The text that the response begins with because of `echo`: the message that the model continues."""
    last = body.messages[-1]
    return join_parts(last.content, "") if body.echo and last.role == "assistant" else ""


def template_message(one: ChatMessage, i: int) -> dict[str, Any]:
    """A message as chat templates expect it. Raises ApiError."""
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
    """The text of a message's content, whose parts are joined. Raises ApiError."""
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
