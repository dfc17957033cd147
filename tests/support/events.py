"""Events of a scripted answer, and streams that take them."""

from typing import Any

from api.streams.stream import Stream
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.events import Events, Terminal, Tokens
from common.messages.records import pack_floats, pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support.token_columns import as_sent
from tests.support.tokenizer import TOKENIZER, model_tokenizer

IDS: list[int] = TOKENIZER.encode(" zero one two three four five six seven eight nine").ids


KEYS = Keys("default")


def tokens(first: int, last: int, attempt: int = 1, request_id: str = "r") -> Tokens:
    """Tokens `first` up to `last`, exclusive, of the scripted answer; attempt n adds n - 1 to each id, so
    that it shows.
    """
    ids = [token_id + attempt - 1 for token_id in IDS[first:last]]
    return Tokens(
        request_id,
        attempt,
        first,
        pack_ids(ids),
        pack_floats([0.0] * len(ids)),
        [TOKENIZER.decode([i]) for i in ids],
    )


def new_stream(request_id: str = "r", stopping: dict[str, Any] | None = None, **options: Any) -> Stream:
    limits = StoppingParams(100, **stopping or {})
    return Stream(Generate(request_id, "d", pack_ids([28]), limits, **options), model_tokenizer())


def end(num_tokens: int, request_id: str = "r") -> Terminal:
    return Terminal(request_id, "length", num_tokens)


def event_message(sequence: int, *events: Tokens | Terminal, source: str = "w0") -> bytes:
    tokens = as_sent(event for event in events if isinstance(event, Tokens))
    terminals = [event for event in events if isinstance(event, Terminal)]
    return encode(Events(source, sequence, terminals=terminals, **tokens))
