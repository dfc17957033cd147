"""The prompt in an answer to a completion with `echo`."""

from api.inference.params import GenerationParams
from api.inference.stream import Stream
from api.inference.tokenizer import ModelTokenizer
from api.openai.request_schemas import CompletionRequest
from common.detokenize import Detokenizer
from common.messages.packing import unpack_ids
from common.messages.request import Generate


def echoed_prompt(
    completion: CompletionRequest, params: GenerationParams, request: Generate, tokenizer: ModelTokenizer
) -> str:
    """The text of the prompt, where it is to be repeated; where that was cut, of what is left of it."""
    if not completion.echo:
        return ""
    prompt_ids = unpack_ids(request.prompt_ids)
    cut = params.truncate is not None and params.truncate == len(prompt_ids)
    if params.text is not None and not cut:
        return params.text
    return str(tokenizer.backend.decode(prompt_ids, skip_special_tokens=False))


def prompt_offsets(stream: Stream, text: str) -> list[int]:
    """Where each token of the prompt begins in its `text`. What only the tokenizer put there (a begin of
    sequence) takes no room.
    """
    tokenizer, special_ids = stream.tokenizer.backend, stream.tokenizer.special_ids
    detokenizer, at, found = Detokenizer(tokenizer, []), 0, []
    for token_id in stream.prompt_ids:
        found.append(at)
        if token_id not in special_ids or text.startswith(
            tokenizer.decode([token_id], skip_special_tokens=False), at
        ):
            at = min(at + len(detokenizer.step(token_id)), len(text))
    return found
