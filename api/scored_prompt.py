"""Scored prompt: the tokens of a request's prompt with their log-probabilities, if it asks for them."""

from collections.abc import Sequence

from common.messages.records import RECORD, TopTokens, unpack_records
from common.messages.request import Generate


class ScoredPrompt:
    """No event carries it: it is read from Redis, and tokens are shown after it only.

    Attributes:
        records: packed records of the prompt's tokens but the first; None until they have come.
    """

    def __init__(self, request: Generate, ids: Sequence[int]) -> None:
        self.ids = ids
        self.width = request.prompt_width
        self.is_wanted = request.prompt_logprobs is not None
        self.records: bytes | None = None

    @property
    def is_missing(self) -> bool:
        return self.is_wanted and self.records is None

    @property
    def num_records(self) -> int:
        return len(self.records or b"") // RECORD.size

    def keep(self, records: bytes | None) -> None:
        """Keep the records if the request asks for them and they are complete."""
        num_bytes = (len(self.ids) - 1) * self.width * RECORD.size
        if self.is_missing and records is not None and len(records) == num_bytes:
            self.records = records

    def tokens(self) -> list[tuple[int, float | None, TopTokens]]:
        """Id, log-probability and likeliest tokens of each token; the first one has only its id."""
        ids, logprobs, tops = unpack_records(self.records or b"", self.width)
        return [(self.ids[0], None, []), *zip(ids, logprobs, tops or [[]] * len(ids), strict=True)]
