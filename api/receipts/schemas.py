"""Receipts and replays, described for /docs. `api/receipts/render.py` makes them."""

from typing import Any

from api.http.openapi import ApiObject


class PromptDigest(ApiObject):
    num_tokens: int
    sha256: str
    """Of the token ids, as little-endian 32-bit integers."""


class ReceiptRun(ApiObject):
    """A worker's share of the tokens."""

    first_token: int
    num_tokens: int
    worker: str | None
    """Null where the broker has lost who made them."""
    build: int | None
    """Index in `builds`."""


class ReceiptChoice(ApiObject):
    index: int
    prompt: int
    """Index in `prompts`."""
    seed: int | None
    """Null for greedy decoding, which needs none."""
    sampling: dict[str, Any]
    stopping: dict[str, Any]
    """Parameters that are not at their defaults, by the names that workers have for them."""
    num_tokens: int
    sha256: str
    """Of the generated token ids, as of a prompt's."""
    finish_reason: str
    runs: list[ReceiptRun]


class Receipt(ApiObject):
    """What an answer was made of, and by what."""

    id: str
    created: int
    model: str
    adapter: str | None
    gateway: str
    """The version that admitted the request."""
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    prompts: list[PromptDigest]
    choices: list[ReceiptChoice]
    builds: list[dict[str, Any] | None]
    """What each worker said of itself: weights, settings, libraries, processor. Null if it said nothing."""


class ReplayedChoice(ApiObject):
    index: int
    equal: bool
    num_tokens: int
    num_replayed: int
    first_difference: int | None
    """Place of the first token that differs, from 0; null if all are equal."""
    token: int | None
    replayed_token: int | None
    """The ids at that place; null where there is none."""


class Difference(ApiObject):
    """A field of the receipts that differs between them, or between the workers of one answer."""

    field: str
    then: list[Any]
    now: list[Any]
    """All its values."""


class ReplayedAnswer(ApiObject):
    """An answer and its replay."""

    id: str
    equal: bool
    """Whether all tokens are the same."""
    exact: bool
    """Whether they must be: there are no `reasons` against it."""
    reasons: list[str]
    choices: list[ReplayedChoice]
    differences: list[Difference]
    receipt: Receipt
    """Of the replay."""
