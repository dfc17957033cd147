"""Parameters of chats and completions: bodies of OpenAI's routes become `GenerationParams`. Those of a chat
come with its prompt, the grammar of its answer, and how that answer is read.
"""

import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from api.answers.answer import Reading, Rendering
from api.answers.call_formats import HARMONY
from api.errors import invalid, quoted
from api.event_loop import offload
from api.grammar.compile import Grammar, describes_json
from api.openai.request_schemas import ChatRequest, CompletionRequest, OpenAIRequest
from api.prompts.control_texts import Rendered
from api.prompts.tokenizer import ModelTokenizer
from api.requests.answer_grammar import answer_grammar, reading_beside
from api.requests.chat_prompt import (
    Chat,
    join_parts,
    picture_sources,
    reasoning_variables,
    render_prompt,
    template_messages,
)
from api.requests.params import GenerationParams
from api.requests.pool import Pool
from api.requests.tools import ToolChoice, read_functions, read_tools
from api.requests.validate import check_generates

log = logging.getLogger(__name__)

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "num_returned": "n",
    "truncate": "truncate_prompt_tokens",
}
"""`GenerationParams` → the names of the fields of both routes, where they differ."""
CHAT_NAMES = {**NAMES, "text": "messages", "top_n_tokens": "top_logprobs"}
PROMPT_NAMES = {**NAMES, "text": "prompt", "prompt_ids": "prompt", "top_n_tokens": "logprobs"}
CHARS_OF_MESSAGE = 40
"""Rendering one message takes about as long as tokenizing this number of characters."""
PROMPT_END_CHARS = 200
"""The end of the prompt in which reasoning may have begun."""
BIAS_KEY = re.compile(r"-?[0-9]{1,10}")

TextsOrIds = list[str] | list[list[int]]


@dataclass(frozen=True, slots=True)
class ChatParams:
    """The parameters of a chat.

    Attributes:
        params: not yet validated.
        prefix: the text that the answer begins with.
    """

    params: GenerationParams
    rendering: Rendering
    prefix: str


# --- chats --------------------------------------------------------------------------------------------------


async def read_chat(body: ChatRequest, pool: Pool, grammar: Grammar | None = None) -> ChatParams:
    """The parameters of a chat. Raises ApiError.

    Args:
        grammar: what the text must look like, if fields of another API say so.
    """
    check_generates(pool.workers.limits)
    tools = tool_choice(body)
    reasons = pool.reasoning_format is not None or pool.call_format.name == HARMONY
    if body.reasoning_effort not in (None, "none") and not reasons:
        note_effort(pool.settings.model_name)
    continues = bool(body.messages) and continues_last_message(body, pool.settings.continue_final_message)
    prompt = await render_chat(body, tools, continues, pool.tokenizer)
    reading = None if continues else new_reading(body, pool, tools, prompt.text[-PROMPT_END_CHARS:])
    params = from_chat(body.with_defaults(pool.tokenizer.sampling_defaults), prompt)
    may_force = tools is None or tools.is_promised or not pool.settings.disable_grammar_support
    asked = grammar or body.grammar()
    if reading is not None:
        reading = await reading_beside(asked, tools, reading, pool.tokenizer)
    forced = await answer_grammar(asked, tools if may_force else None, reading, pool.tokenizer)
    rendering = replace(body.rendering, reading=reading, is_json=describes_json(asked))
    return ChatParams(replace(params, grammar=forced), rendering, echoed_message(body))


@functools.cache
def note_effort(model: str) -> None:
    """Log, once for each model, that an effort has no effect: frameworks send one to every model."""
    log.warning("`reasoning_effort` has no effect: %s does not reason", model)


def tool_choice(body: ChatRequest) -> ToolChoice | None:
    """The tools that the answer may or must call; None for none. Raises ApiError."""
    older = [name for name in ("functions", "function_call") if getattr(body, name)]
    newer = [name for name in ("tools", "tool_choice") if getattr(body, name)]
    if older and newer:
        raise invalid(f"`{older[0]}` and `{newer[0]}` exclude each other", older[0])
    if older:
        return read_functions(body.functions, body.function_call)
    return read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)


def continues_last_message(body: ChatRequest, by_default: bool) -> bool:
    """Whether the model continues the last message. Raises ApiError for contradicting fields.

    Args:
        by_default: the answer if no field says it.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            "continue_final_message",
        )
    if body.continue_final_message is not None:
        return body.continue_final_message
    last = body.messages[-1]
    continues = by_default if body.add_generation_prompt is None else not body.add_generation_prompt
    return continues and last.role == "assistant" and not last.has_calls


async def render_chat(
    body: ChatRequest, tools: ToolChoice | None, continues: bool, tokenizer: ModelTokenizer
) -> Rendered:
    """The prompt of a chat, rendered in a thread if there are many messages. Raises ApiError."""

    def render() -> Rendered:
        chat = read_messages(body, tools, continues, tokenizer)
        return render_prompt(chat, tokenizer.chat_template, tokenizer.controls)

    size = CHARS_OF_MESSAGE * (len(body.messages) + (len(tools.tools) if tools else 0))
    return await offload(size, render)


def read_messages(
    body: ChatRequest, tools: ToolChoice | None, continues: bool, tokenizer: ModelTokenizer
) -> Chat:
    """The chat, as its template takes it. Raises ApiError."""
    template = tokenizer.chat_template
    if continues and tools is not None and tools.is_forced:
        raise invalid("`continue_final_message` and a forced `tool_choice` exclude each other", "tool_choice")
    return Chat(
        messages=template_messages(body.messages, sees=tokenizer.pictures is not None),
        tools=tools,
        tool_prompt=body.tool_prompt,
        variables=reasoning_variables(body.reasoning_effort, body.chat_template_kwargs or {}, template),
        add_generation_prompt=body.add_generation_prompt is not False,
        continues_final_message=continues,
    )


def new_reading(body: ChatRequest, pool: Pool, tools: ToolChoice | None, prompt_end: str) -> Reading | None:
    """How the answer is read; None if all of it is content."""
    calls = pool.call_format.name if tools or pool.call_format.name == HARMONY else ""
    reasoning = pool.reasoning_format.name if pool.reasoning_format else ""
    if not (calls or reasoning):
        return None
    return Reading(
        calls=calls,
        reasoning=reasoning,
        prompt_end=prompt_end,
        tools=[(one.name, json.dumps(one.parameters)) for one in tools.callable] if tools else [],
        is_named=bool(tools and tools.is_named),
        parallel=tools is None or tools.parallel,
        is_older=bool(tools and tools.is_older),
        shows_reasoning=body.include_reasoning is not False,
    )


def from_chat(body: ChatRequest, prompt: Rendered) -> GenerationParams:
    """The parameters of a chat whose template rendered `prompt`. Raises ApiError."""
    most, newer = body.max_tokens, body.max_completion_tokens
    if most is not None and newer is not None and most != newer:
        raise invalid(
            "`max_tokens` and `max_completion_tokens` differ: give one of them", "max_completion_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs`: true", "top_logprobs")
    names = CHAT_NAMES if newer is None else CHAT_NAMES | {"max_new_tokens": "max_completion_tokens"}
    return replace(
        common_params(body, names),
        text=prompt.text,
        guarded=prompt.guarded,
        pictures=picture_sources(body.messages),
        add_special_tokens=bool(body.add_special_tokens),
        max_new_tokens=most if newer is None else newer,
        top_n_tokens=body.top_logprobs or 0,
        prompt_logprobs=body.rendering.prompt_tops,
    )


def echoed_message(body: ChatRequest) -> str:
    """With `echo`, the text that the response begins with: the message that the model continues."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    return join_parts(last.content or "", "", may_refuse=True)


# --- completions --------------------------------------------------------------------------------------------


def read_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> TextsOrIds:
    """The prompts of a body, each a text or token ids. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("`prompt` cannot be empty", "prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def from_completion(body: CompletionRequest, prompts: TextsOrIds) -> list[GenerationParams]:
    """The parameters of each prompt. Raises ApiError."""
    if body.shows_prompt_only and body.search_width is not None:
        raise invalid("`max_tokens` must be at least 1 in a beam search", "max_tokens")
    params = replace(
        common_params(body, PROMPT_NAMES),
        add_special_tokens=body.add_special_tokens is not False,
        max_new_tokens=1 if body.shows_prompt_only else body.max_tokens,
        top_n_tokens=body.logprobs or 0,
        prompt_logprobs=most_prompt_tops(body),
    )
    return [
        replace(params, text=prompt) if isinstance(prompt, str) else replace(params, prompt_ids=prompt)
        for prompt in prompts
    ]


def most_prompt_tops(body: CompletionRequest) -> int | None:
    """How many of the likeliest tokens are needed at each position of the prompt; None if none are shown."""
    wanted = [body.rendering.prompt_tops, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)


# --- both ---------------------------------------------------------------------------------------------------


def common_params(body: OpenAIRequest, names: Mapping[str, str]) -> GenerationParams:
    """The parameters of both routes. The model's own defaults are in the body already (`with_defaults`)."""
    to_fit = body.truncate_prompt_tokens == -1
    beams = body.beam_params(body.search_width, body.n)
    return GenerationParams(
        truncate=None if to_fit else body.truncate_prompt_tokens,
        truncates_to_fit=to_fit,
        cache_salt=body.salt(),
        stopping=body.stopping_params(
            body.min_tokens, [body.stop] if isinstance(body.stop, str) else body.stop
        ),
        do_sample=beams is None,
        sampling=body.sampling_params(
            "raw_logprobs",
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=logit_bias(body.logit_bias or {}),
        ),
        seed=body.seed,
        bad_words=body.bad_words or [],
        grammar=body.grammar(),
        context_logits=bool(body.return_context_logits),
        generation_logits=bool(body.return_generation_logits),
        logits_dtype=body.logits_dtype,
        n=1 if body.n is None or beams else body.n,
        beams=beams,
        names={**names, "beam_width": body.width_field},
    )


def logit_bias(biases: Mapping[str, float]) -> list[tuple[int, float]]:
    for key in biases:
        if not BIAS_KEY.fullmatch(key):
            raise invalid(f"`logit_bias` must have token ids as keys. Given: {quoted(key)}", "logit_bias")
    return [*{int(key): value for key, value in biases.items()}.items()]
