"""Scored prompt: the tokens of a request's prompt with their log-probabilities, if it asks for them, and how
many of them were not computed for it.
"""

from collections.abc import Sequence

from common.broker.committed import Committed
from common.messages.records import RECORD, TopTokens, unpack_records
from common.messages.request import Generate


class ScoredPrompt:
    """No event carries log-probabilities: they are read from Redis, and tokens are shown after them only.

    Attributes:
        records: packed records of the prompt's tokens but the first; None until they have come.
        is_missing: whether they are requested and have not come.
        num_cached: tokens of the prompt whose KV its worker had; known with the first generated token.
    """

    def __init__(self, request: Generate, ids: Sequence[int]) -> None:
        self.ids = ids
        self.width = request.prompt_width
        self.is_missing = request.prompt_logprobs is not None
        self.records: bytes | None = None
        self.num_cached = 0

    @property
    def num_records(self) -> int:
        return len(self.records or b"") // RECORD.size

    def store(self, state: Committed) -> None:
        """Keep what is committed: the records only if the request asks for them and they are complete."""
        if state.num_cached is not None:
            self.num_cached = state.num_cached
        records = state.prompt
        num_bytes = (len(self.ids) - 1) * self.width * RECORD.size
        if self.is_missing and records is not None and len(records) == num_bytes:
            self.records = records
            self.is_missing = False

    def tokens(self) -> list[tuple[int, float | None, TopTokens]]:
        """Id, log-probability and likeliest tokens of each token; the first one has only its id."""
        ids, logprobs, tops = unpack_records(self.records or b"", self.width)
        return [(self.ids[0], None, []), *zip(ids, logprobs, tops or [[]] * len(ids), strict=True)]
