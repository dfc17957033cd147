"""Plan messages, between batcher and workers: plans, the rows that start, reports, capacities, deaths."""

from dataclasses import dataclass

from common.messages.codec import wire_field
from common.messages.records import unpack_columns
from common.messages.request import Generate


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that starts on a worker: one attempt of one request. The batcher makes it, the agent follows its
    text, and the engine computes it: prefill computes the KV of `ids`, then tokens `base`, `base + 1` … are
    sampled.

    Attributes:
        row: number of the row, unique within the incarnation; those of one engine go on.
        base: index of the first token this attempt samples; the number of records in `committed`.
        committed: packed records of the tokens of earlier attempts, which are never sampled again.
        blocks: packed numbers of the KV blocks that the row starts with, in order; never block 0, which is
            scratch.
        num_cached: tokens whose KV the first of these blocks hold already. Other rows have them, too.
        contents: the bytes of each of the request's pictures, which the agent adds; empty for those that the
            engine need not see, since their tokens are cached.
        is_suspect: a worker died while it held the request, which has had no token since.
    """

    row: int = wire_field("r")
    attempt: int = wire_field("a")
    base: int = wire_field("b")
    committed: bytes = wire_field("s")
    blocks: bytes = wire_field("k")
    request: Generate = wire_field("q")
    num_cached: int = wire_field("nc", default=0)
    contents: list[bytes] = wire_field("ct", default_factory=list)
    is_suspect: bool = wire_field("su", default=False)

    @property
    def ids(self) -> bytes:
        """Packed ids: the prompt, then the tokens of earlier attempts."""
        committed_ids, *_ = unpack_columns(bytearray(self.committed), 0, self.request.width)
        return self.request.prompt_ids + committed_ids

    @property
    def prompt_logprobs(self) -> int | None:
        """How many likeliest tokens are reported beside each token of the prompt; None reports nothing of it:
        it is not asked for, or an earlier attempt has done so.
        """
        return None if self.base else self.request.prompt_logprobs


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker does from its next step boundary on. Stops come first, then blocks, then starts.

    It is an entry of the stream `plans:{worker}` with the id `{epoch}-{number}`. The agent hands it to the
    engine, as a frame.

    Attributes:
        until: the last step granted; for the engine never smaller than in an earlier plan.
        prefill_tokens: most prompt tokens in one step, over all rows; longer prompts are chunked.
        mixed_prefill_tokens: most prompt tokens in a step in which rows decode; 0 is `prefill_tokens`.
        bulk_tokens: most tokens of prompts of the class `batch` in a step, while more urgent requests come; 0
            sets no bound.
        starts: rows that start, in order; one that has its last token already is reported ended.
        blocks: (row, packed numbers of blocks) that rows get in addition; ignored if the row has ended.
        stops: (row, why): the row takes part in no further step and is reported ended with `why`.
        acknowledged: sequence of the last report applied; the worker trims its reports up to it.
        takeover: the plan of a new batcher; the worker answers with such a report, and its rows go on.
        max_rows: most places in one step, taken by the first rows that have not ended; the others stand by;
            0 sets no bound. A row has one place, a beam search one for each beam.
        report_at: the step at which a report is due, so that the next grant comes in time; 0 is half of the
            steps left.
    """

    epoch: int = wire_field("e")
    number: int = wire_field("n")
    until: int = wire_field("u")
    prefill_tokens: int = wire_field("pt")
    starts: list[NewRow] = wire_field("s", default_factory=list)
    blocks: list[tuple[int, bytes]] = wire_field("b", default_factory=list)
    stops: list[tuple[int, str]] = wire_field("x", default_factory=list)
    acknowledged: int = wire_field("k", default=0)
    takeover: bool = wire_field("t", default=False)
    mixed_prefill_tokens: int = wire_field("mp", default=0)
    max_rows: int = wire_field("mr", default=0)
    report_at: int = wire_field("ra", default=0)
    bulk_tokens: int = wire_field("bt", default=0)


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A row as a worker holds it when a new batcher takes over.

    Attributes:
        base: index of the first token that this attempt samples.
        num_tokens: tokens generated, over all attempts.
        blocks: packed numbers of the KV blocks that the row has.
        kv_len, step: after step `step` it held `kv_len` tokens, and more with the steps since; 0
            before its prompt is computed.
        ended: whether it takes part in no further step; its blocks are released by a later report.
        num_cached: tokens whose KV the first blocks held when it started.
    """

    row: int = wire_field("r")
    request_id: str = wire_field("id")
    attempt: int = wire_field("a")
    base: int = wire_field("b")
    num_tokens: int = wire_field("n")
    blocks: bytes = wire_field("k")
    kv_len: int = wire_field("kv", default=0)
    step: int = wire_field("s", default=0)
    ended: bool = wire_field("x", default=False)
    num_cached: int = wire_field("nc", default=0)


@dataclass(frozen=True, slots=True)
class Report:
    """What happened on a worker since its last report.

    It is an entry of the stream `reports:{worker}` with the id `{sequence}-0`.

    Attributes:
        sequence: number of the flush that wrote it; increases, with gaps.
        epoch, plan: the newest plan applied.
        step: the last step completed.
        prefilled: (row, kv_len, step) of rows whose prompt is computed; from `step` on they grow by one token
            in each step, but for `lengths`.
        ended: (row, why, number of tokens generated).
        released: (row, kv_len): the row has its blocks no more.
        hashes: (row, hashes) of released rows that have generated whole pieces (`extend_hashes`): the hashes
            after those of the prompt, of tokens whose KV is computed.
        takeover: answer to a plan with `takeover`. `held` has every row that is not released then, in the
            order of their starts; nothing that earlier reports say counts beside it.
        last_row: with `takeover`: the highest number that a row of this engine ever had.
        reports_lost: the broker lost flushes before this one, and with them reports that nobody may have
            read.
        step_times: (steps, those of them in which rows decoded, tokens of prompts that they computed, their
            milliseconds) since the last report, of each kind of steps.
        lengths: (row, kv_len, step) of rows that have had several tokens in one step, by speculation, or
            none in many: after `step` they held `kv_len` tokens, and from there on they are taken to grow by
            one in each step, until a report says more.
        round_trips: ms from the step at which a report was due until the engine had the next grant, of each
            since the last report.
        snapshots: blocks at whose ends the worker has kept the states of its model, and negative those of
            which it has them no more.
    """

    sequence: int = wire_field("q")
    epoch: int = wire_field("e")
    plan: int = wire_field("n")
    step: int = wire_field("s")
    prefilled: list[tuple[int, int, int]] = wire_field("p", default_factory=list)
    ended: list[tuple[int, str, int]] = wire_field("x", default_factory=list)
    released: list[tuple[int, int]] = wire_field("r", default_factory=list)
    takeover: bool = wire_field("t", default=False)
    held: list[HeldRow] = wire_field("h", default_factory=list)
    last_row: int = wire_field("lr", default=0)
    reports_lost: bool = wire_field("l", default=False)
    hashes: list[tuple[int, bytes]] = wire_field("bh", default_factory=list)
    step_times: list[tuple[int, int, int, float]] = wire_field("st", default_factory=list)
    lengths: list[tuple[int, int, int]] = wire_field("ln", default_factory=list)
    round_trips: list[float] = wire_field("rt", default_factory=list)
    snapshots: list[int] = wire_field("sn", default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """Capacity of a worker, measured at warm-up; field `capacity` of the hash `worker:{incarnation}`. An
    engine says it without the names, and the agent adds them.

    Attributes:
        num_blocks: blocks that may be granted, numbered from 1 on.
        max_batch_prefill_tokens: most prompt tokens of one step, by the times of the warm-up.
        model: its name for people; gateways of other pools find its tokenizer by `model_id`, or else by
            `tokenizer_name` if it is not the model's.
        context: longest sequence that the model supports, in tokens.
        eos_ids: packed ids that end a generation.
        prefix_caching: whether rows can start with blocks that other rows have computed.
        standby: whether it obeys `max_rows` of a plan, so that rows can stand by.
        vocab_size: logits of one position; 0 if it returns none.
        served_names: the model's names, by which clients may ask for it.
        max_loras, max_lora_rank: LoRA adapters that the rows of one step may have, and their largest rank; 0
            if it serves none.
        pictures: whether it computes rows with pictures.
        all_pictures: its engine needs those among cached tokens, too: the positions after them depend on
            their sizes.
        max_rows: rows whose states have room, in a model that has states; 0: as many as MAX_BATCH_SIZE.
        pooling: EMBED or CLASSIFY (request.py) if its requests pool, with `vocab_size` values each; empty if
            they generate.
        token_ms: time of one prompt token.
        model_digest: of the model's files, the same on all machines; empty if it is not known.
    """

    incarnation: str = wire_field("i")
    name: str = wire_field("nm")
    model: str = wire_field("m")
    dtype: str = wire_field("d")
    block_size: int = wire_field("bs")
    num_blocks: int = wire_field("nb")
    max_batch_prefill_tokens: int = wire_field("pt")
    context: int = wire_field("c")
    eos_ids: bytes = wire_field("eo", default=b"")
    world_size: int = wire_field("w", default=1)
    device: str = wire_field("dv", default="")
    model_id: str = wire_field("mi", default="")
    prefix_caching: bool = wire_field("pc", default=False)
    standby: bool = wire_field("sb", default=False)
    tokenizer_name: str = wire_field("tn", default="")
    vocab_size: int = wire_field("vs", default=0)
    served_names: list[str] = wire_field("sn", default_factory=list)
    max_loras: int = wire_field("la", default=0)
    max_lora_rank: int = wire_field("lr", default=0)
    pictures: bool = wire_field("pi", default=False)
    max_rows: int = wire_field("mr", default=0)
    pooling: str = wire_field("po", default="")
    all_pictures: bool = wire_field("ap", default=False)
    token_ms: float = wire_field("tm", default=0.0)
    model_digest: str = wire_field("md", default="")

    def places(self, max_batch_size: int) -> int:
        """Rows that it runs at a time, with this MAX_BATCH_SIZE."""
        return min(max_batch_size, self.max_rows or max_batch_size)

    @property
    def max_total_tokens(self) -> int:
        """Longest request that this worker can hold."""
        return min(self.context, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A launcher saw a worker process end: its logs can be sealed before its heartbeat expires."""

    incarnation: str = wire_field("i")
