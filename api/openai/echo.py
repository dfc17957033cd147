"""The prompt in the response to a completion with `echo`."""

from api.inference.params import GenerationParams
from api.openai.request_schemas import CompletionRequest
from api.streams.stream import Stream
from api.tokenizer import ModelTokenizer
from common.detokenize import Detokenizer
from common.messages.packing import unpack_ids
from common.messages.request import Generate


def echoed_prompt(
    completion: CompletionRequest, params: GenerationParams, request: Generate, tokenizer: ModelTokenizer
) -> str:
    """The text of the prompt if `echo` is set, else nothing. Of a truncated prompt, what is left of it."""
    if not completion.echo:
        return ""
    prompt_ids = unpack_ids(request.prompt_ids)
    cut = params.truncate is not None and params.truncate == len(prompt_ids)
    if params.text is not None and not cut:
        return params.text
    return str(tokenizer.backend.decode(prompt_ids, skip_special_tokens=False))


def prompt_offsets(stream: Stream, text: str) -> list[int]:
    """The offset in `text` at which each token of the prompt begins. Special tokens that the tokenizer added
    (begin of sequence) have no characters in it.
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
