"""A request as the batcher sees it, and its stay on a worker."""

from dataclasses import dataclass, field

from common.broker.stream_ids import parse_stream_id
from common.messages.records import RECORD
from common.messages.request import Generate


@dataclass(slots=True, eq=False)
class Sequence:
    """One live request.

    Attributes:
        entry_id, entry_bytes: of its entry in the stream `requests`.
        deadline_ms: Redis time after which it ends with an error.
        records: packed records of all committed tokens, as last read; the row that runs may be ahead of it.
        crash_count: incarnations that ended under it without a token committed beyond its base.
        suspect: whether its worker died under it, until what is committed has been read.
        asked_to_end: why a running row was asked to stop for good, or a waiting one shall not start.
        order: place in the queue; smaller starts first.
    """

    request: Generate
    entry_id: str
    entry_bytes: int
    deadline_ms: int
    records: bytes = b""
    attempt: int = 0
    crash_count: int = 0
    suspect: bool = False
    asked_to_end: str = ""
    row: "Row | None" = None
    waiting: bool = False
    order: tuple[int, int, int] = (1, 0, 0)

    def __post_init__(self) -> None:
        self.order = (1, 0, self.rank)

    @property
    def rank(self) -> int:
        """Age among all requests of the pool."""
        ms, number = parse_stream_id(self.entry_id)
        return (ms << 24) + number

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids) // 4

    @property
    def base(self) -> int:
        return len(self.records) // (RECORD.size * self.request.width)

    @property
    def num_known(self) -> int:
        """Tokens that a prefill computes: the prompt and what was generated so far."""
        return self.num_prompt + self.base

    @property
    def max_kv(self) -> int:
        """KV slots it can ever fill: the last token sampled is never an input."""
        return self.num_prompt + self.request.max_new_tokens - 1


@dataclass(slots=True, eq=False)
class Row:
    """One attempt of a sequence on a worker.

    Attributes:
        blocks: KV blocks it owns, until the engine reports it released.
        kv_len, at_step: after step `at_step` it held `kv_len` tokens, and one more with each step since; 0
            before its prefill is done.
        handed_over: whether the worker has been told of it.
        stopping: why it was asked to stop, once it was.
        ended: whether the worker said that it takes part in no further step.
    """

    number: int
    sequence: Sequence
    blocks: list[int] = field(default_factory=list)
    kv_len: int = 0
    at_step: int = 0
    handed_over: bool = False
    stopping: str = ""
    ended: bool = False

    @property
    def prefilled(self) -> bool:
        return self.kv_len > 0

    def kv_at(self, step: int, start: int) -> int:
        """The most KV slots it can have filled after `step`; `start` is the step at which it might have begun
        at the earliest.
        """
        grown = (
            self.kv_len + step - self.at_step if self.prefilled else self.sequence.num_known + step - start
        )
        return min(grown, self.sequence.max_kv)
