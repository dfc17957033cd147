"""Sequence: a request in the batcher. PlacedRow: one attempt of it on a worker."""

from dataclasses import dataclass, field

from common.broker.keys import parse_stream_id
from common.messages.records import RECORD, group_room, num_group_blocks, unpack_columns
from common.messages.request import Generate, block_names, class_index, extend_hashes

PREEMPT = "preempt"
"""`PlacedRow.stopping` of a row that is to be preempted and was not asked to stop yet."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One live request.

    Attributes:
        entry_id: id of its entry in the stream `requests`.
        deadline_ms: time of the pool's clock at which it ends with an error.
        records: packed records of all committed tokens, as last read; a running row may be ahead of them, and
            an adopted row has none.
        base: how many tokens were committed when its row began, or when `records` was read.
        crash_count: how many workers in a row died under it without a new committed token.
        stop_reason: why it ends: its row is asked to stop, or it never starts.
        class_index: of its service class: 0 is the most urgent.
        resumed: whether it waits before new requests, since it was interrupted.
        num_passed: requests that started while it did not fit.
        follows: the row that computes the beginning of its prompt; it starts after that.
        refused_at: number of the last change of a worker before it was refused for want of room.
        stays: it started because its class had waited long enough, and makes no room for others.
        victim: the row that was preempted last to make room for it.
        block_hashes: hashes of the prompt and of `records` (common/messages/request.py); none where the
            request shares no blocks.
        num_places: places of a batch that its row takes: a beam search takes one for each beam.
        arrival: order of arrival among all requests of the pool, by the id of its first entry.
        num_prompt: tokens of its prompt.
        max_kv: KV slots it can ever fill: the last token sampled is never an input.
        named_blocks: block size → names of the blocks that prompt and `records` fill.
    """

    request: Generate
    entry_id: str
    deadline_ms: int
    records: bytes = b""
    base: int = 0
    attempt: int = 0
    crash_count: int = 0
    stop_reason: str = ""
    row: "PlacedRow | None" = None
    waiting: bool = False
    class_index: int = 0
    resumed: bool = False
    num_passed: int = 0
    follows: "PlacedRow | None" = None
    refused_at: int = 0
    stays: bool = False
    victim: "PlacedRow | None" = None
    block_hashes: bytes = b""
    named_blocks: dict[int, list[bytes]] = field(default_factory=dict)
    num_places: int = 1
    arrival: int = field(init=False)
    num_prompt: int = field(init=False)
    max_kv: int = field(init=False)

    def __post_init__(self) -> None:
        self.class_index = class_index(self.request.class_name)
        self.block_hashes = self.request.block_hashes
        self.num_places = self.request.beams.width if self.request.beams else 1
        ms, number = parse_stream_id(self.entry_id)
        self.arrival = (ms << 24) + number
        self.num_prompt = self.request.num_prompt
        self.max_kv = self.request.max_kv

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def queued_ms(self) -> int:
        """What the pool's clock showed when it was queued."""
        return self.deadline_ms - self.request.ttl_ms

    @property
    def has_victim(self) -> bool:
        """Whether the row that makes room for it has not ended."""
        return self.victim is not None and self.victim.sequence.row is self.victim

    def commit(self, records: bytes) -> None:
        """Set what is committed."""
        self.records = records
        self.base = len(records) // (RECORD.size * self.request.width)
        if self.request.block_hashes:
            ids, *_ = unpack_columns(bytearray(records), 0, self.request.width)
            known, pictures = self.request.block_hashes, self.request.pictures
            self.block_hashes = extend_hashes(known, self.request.prompt_ids + ids, pictures)
            self.named_blocks = {}

    def names(self, block_size: int) -> list[bytes]:
        """Return the names of the blocks that prompt and committed tokens fill."""
        if (names := self.named_blocks.get(block_size)) is None:
            names = self.named_blocks[block_size] = block_names(self.block_hashes, block_size)
        return names

    @property
    def num_known(self) -> int:
        """Tokens that a prefill computes: the prompt and the committed tokens."""
        return self.num_prompt + self.base

    def blocks_for(self, kv_len: int, block_size: int) -> int:
        """Return how many blocks its row needs for `kv_len` tokens."""
        if self.request.beams is None:
            return -(-kv_len // block_size)
        return num_group_blocks(self.num_prompt, kv_len, self.num_places, block_size)

    def kv_room(self, num_blocks: int, block_size: int) -> int:
        """Return how many tokens `num_blocks` of its row's blocks hold: the inverse of `blocks_for`."""
        if self.request.beams is None:
            return num_blocks * block_size
        return group_room(self.num_prompt, num_blocks, self.num_places, block_size)

    def kv_ahead(self, tokens: int) -> int:
        """Return how many KV slots it can fill with `tokens` more tokens."""
        return min(self.num_known + tokens, self.max_kv)


@dataclass(slots=True, eq=False)
class PlacedRow:
    """One attempt of a sequence on a worker.

    Attributes:
        blocks: KV blocks it has, until the engine reports it released.
        reserved: blocks that its worker keeps free for it.
        num_cached: tokens whose KV the first blocks held when it started.
        kv_len, at_step: after step `at_step` it held `kv_len` tokens, and presumably one more after each
            later step; 0 before its prefill is done.
        added_at: the last step that its worker had reported when it was placed, or adopted; with
            MAX_WAITING_TOKENS, when it last stood by.
        stopping: why it was asked to stop, once it was.
        ended: whether the worker reported that it takes part in no further step.
        worker: the incarnation that holds it.
        followers: requests that wait until its prompt is computed.
        charged: tokens that its tenant is charged with until it is released; None if it was adopted.
    """

    number: int
    sequence: Sequence
    blocks: list[int] = field(default_factory=list)
    kv_len: int = 0
    at_step: int = 0
    added_at: int = 0
    stopping: str = ""
    ended: bool = False
    num_cached: int = 0
    reserved: int = 0
    worker: str = ""
    followers: list[Sequence] = field(default_factory=list)
    charged: int | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.kv_len > 0

    @property
    def was_interrupted(self) -> bool:
        """Whether its answer has begun, and stands still until its tokens are computed again."""
        return self.sequence.base > 0 and not self.is_prefilled

    def kv_at(self, step: int, start: int) -> int:
        """Return the most KV slots it can have filled after `step`, if it began at `start` or later."""
        if self.is_prefilled:
            num_filled = self.kv_len + step - self.at_step
        else:
            num_filled = self.sequence.num_known + step - start
        return min(num_filled, self.sequence.max_kv)

    def num_missing(self, step: int, start: int, block_size: int) -> int:
        """Return how many blocks more than it has it may need after `step`, as `kv_at` says."""
        return self.sequence.blocks_for(self.kv_at(step, start), block_size) - len(self.blocks)
