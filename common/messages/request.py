"""Request messages, from gateways: a request, its class, its sampling and stopping parameters, its cancel;
and block hashes, which name KV blocks by what they hold, so that rows that begin alike can share blocks.

Logits: position p is the token whose logits say what comes at p + 1. The context's logits are those of all
positions of the prompt; the generation's are those that each generated token was chosen from, the first one
from the prompt's last position. So the rows of both are neighbours, and are kept as one run of rows. The
vector or score of a request that pools travels as logits of one position, the prompt's last: it is computed,
lost and computed again like these.

A block hash names HASHED_TOKENS tokens and all tokens before them: it is the digest of the hash before it, of
their ids, and of the digests of pictures whose placeholders are among them. The first of all, the root, is
the digest of a salt, with the adapter as its key: requests with other salts or adapters share nothing.
Gateways hash prompts, agents what is generated, the batcher what a request resumes with. A block of several
times HASHED_TOKENS has the name of the last hash within it, so workers of different block sizes can use the
same hashes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from common.messages.codec import wire_field

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one logit, by dtype."""


@dataclass(frozen=True, slots=True)
class LogitsParams:
    """Which logits a request returns: the model's own, before penalties and temperature.

    Attributes:
        context: those of the prompt.
        generation: those of the generated tokens.
        dtype: of ITEM_BYTES; values are little-endian.
        vocab_size: logits of one position.
    """

    context: bool = wire_field("c")
    generation: bool = wire_field("g")
    dtype: str = wire_field("d")
    vocab_size: int = wire_field("v")

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return self.vocab_size * ITEM_BYTES[self.dtype]

    def first_position(self, num_prompt: int) -> int:
        return 0 if self.context else num_prompt - 1

    def end_position(self, num_prompt: int, num_tokens: int) -> int:
        """The position after the last one, of an answer with `num_tokens` generated tokens."""
        return num_prompt + (max(num_tokens, 1) - 1 if self.generation else 0)

    def num_rows(self, num_prompt: int, num_tokens: int) -> int:
        """Positions whose logits are kept."""
        return self.end_position(num_prompt, num_tokens) - self.first_position(num_prompt)

    def num_bytes(self, num_prompt: int, num_tokens: int) -> int:
        return self.num_rows(num_prompt, num_tokens) * self.row_bytes


EMBED, CLASSIFY = "embed", "classify"
"""What a model makes of a text: a vector that stands for it, or a score."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt is pooled.

    Attributes:
        pair_start: of a pair of texts the position at which the second begins; 0 is a single text.
    """

    pair_start: int = wire_field("ps", default=0)

    def logits(self, size: int) -> LogitsParams:
        """How the values of its answer travel; `size` is their number."""
        return LogitsParams(False, True, "float32", size)


SERVICE_CLASSES = ("interactive", "standard", "batch")
"""The most urgent first."""
LEAST_URGENT = len(SERVICE_CLASSES) - 1
"""The index of the class `batch`."""
DEFAULT_CLASS = "standard"
CLASS_INDEXES = {name: index for index, name in enumerate(SERVICE_CLASSES)}
TOP_P_MIN = 1e-6


def service_class(class_name: str) -> str:
    """Return a request's class; the default if it names none, or one that is not known here."""
    return class_name if class_name in SERVICE_CLASSES else DEFAULT_CLASS


def class_index(class_name: str) -> int:
    """Return the index of a request's class: 0 is the most urgent."""
    return CLASS_INDEXES.get(class_name, CLASS_INDEXES[DEFAULT_CLASS])


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a row are sampled. Defaults change nothing: greedy, without penalties.

    Applied in this order: logit bias, watermark, banned words, repetition, frequency and presence penalties,
    grammar or allowed ids, temperature, top-k, top-p, min-p, typical-p; then one token is drawn. The random
    number for a token is a function of (seed, choice, index of the token).

    Attributes:
        temperature: 0 is greedy: the likeliest token after bias and penalties.
        top_k: 0 is off.
        repetition_penalty: over the ids of prompt and generation, as in CTRL (arXiv:1909.05858).
        frequency_penalty, presence_penalty: OpenAI's; over generated ids.
        relative_frequency_penalty: TGI's; times the share of an id in prompt and generation.
        choice: index of this answer among the n of one request.
        logit_bias: (id, number added to its logit).
        bad_words: ids of sequences that are never completed.
        top_p_decay, top_p_min, top_p_reset_ids: top_p shrinks by this factor with each token, down to its
            minimum, until one of these ids comes: then it starts again (arXiv:2206.04624).
        raw_logprobs: whether log-probabilities are of the model's own distribution (OpenAI's way) or of the
            processed one (TGI's).
        report_logits: whether logits, raw or processed, are reported in place of log-probabilities.
        grammar: what the text must look like, in llguidance's form; "" is any text.
        allowed_token_ids: ids of which each token is one; empty is all. Not beside a grammar.
        watermark_delta: what is added to the logits of green tokens (arXiv:2301.10226, as in TGI); 0 is no
            watermark.
        watermark_gamma: share of the vocabulary that is green; which tokens are follows from the last one.
    """

    temperature: float = wire_field("t", default=0.0)
    top_k: int = wire_field("k", default=0)
    top_p: float = wire_field("p", default=1.0)
    min_p: float = wire_field("m", default=0.0)
    typical_p: float = wire_field("y", default=1.0)
    repetition_penalty: float = wire_field("r", default=1.0)
    frequency_penalty: float = wire_field("f", default=0.0)
    presence_penalty: float = wire_field("e", default=0.0)
    relative_frequency_penalty: float = wire_field("l", default=0.0)
    seed: int = wire_field("s", default=0)
    choice: int = wire_field("c", default=0)
    logit_bias: list[tuple[int, float]] = wire_field("b", default_factory=list)
    bad_words: list[list[int]] = wire_field("w", default_factory=list)
    top_p_decay: float = wire_field("d", default=1.0)
    top_p_min: float = wire_field("n", default=TOP_P_MIN)
    top_p_reset_ids: list[int] = wire_field("i", default_factory=list)
    raw_logprobs: bool = wire_field("x", default=False)
    grammar: str = wire_field("g", default="")
    allowed_token_ids: list[int] = wire_field("a", default_factory=list)
    watermark_delta: float = wire_field("wd", default=0.0)
    watermark_gamma: float = wire_field("wg", default=0.0)
    report_logits: bool = wire_field("rl", default=False)


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How a beam search looks for the sequences of the highest score. Tokens are not drawn.

    Attributes:
        width: sequences that are extended in each step, and that it finds.
        length_penalty: a sequence's score is the sum of its log-probabilities, divided by its length in
            generated tokens to this power.
        early_stopping: 1 ends it once `width` sequences have ended; 0 once no open one promises a better
            score at its present length; 2 once none can reach a better one (transformers' True, False and
            "never").
        diversity: TensorRT-LLM's `beamSearchDiversityRate`; 0 is off.
        num_returned: sequences that its answer has, the best ones.
    """

    width: int = wire_field("w")
    length_penalty: float = wire_field("l", default=1.0)
    early_stopping: int = wire_field("e", default=0)
    diversity: float = wire_field("d", default=0.0)
    num_returned: int = wire_field("n", default=1)


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """What ends a request. The engine compares ids and counts tokens, the agent compares stop strings.
    Tokens of all attempts count.

    Attributes:
        max_new_tokens: length at which it ends with reason `length`.
        min_new_tokens: length before which no end-of-sequence token, stop id or stop string ends it; such
            ids are not sampled.
        stop: strings that end it with reason `stop_sequence`.
        stop_ids: token ids that end it with reason `stop_sequence`.
        ignore_eos: whether it goes on after an end-of-sequence token.
    """

    max_new_tokens: int = wire_field("mx", default=0)
    min_new_tokens: int = wire_field("mn", default=0)
    stop: list[str] = wire_field("st", default_factory=list)
    stop_ids: list[int] = wire_field("si", default_factory=list)
    ignore_eos: bool = wire_field("ie", default=False)


@dataclass(frozen=True, slots=True)
class UsageAccount:
    """Who pays for a request, and what its API key may spend.

    Attributes:
        model: the name by which its tokens are counted.
        pays_prompt: whether it pays for its prompt: the first choice of a prompt does.
        budget_tokens: of the API key for a calendar month (UTC); 0 is none.
    """

    model: str = wire_field("m")
    pays_prompt: bool = wire_field("pp", default=True)
    budget_tokens: int = wire_field("bt", default=0)

    @property
    def has_budget(self) -> bool:
        return self.budget_tokens > 0


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a prompt: its placeholders are tokens of the prompt like any others.

    Attributes:
        digest: SHA-256 of its bytes, in hexadecimal digits; names the key that has them.
        start: position in the prompt of its first placeholder.
        num_tokens: number of its placeholders, counting those between its parts.
    """

    digest: str = wire_field("d")
    start: int = wire_field("s")
    num_tokens: int = wire_field("n")


@dataclass(frozen=True, slots=True)
class Generate:
    """A request; an entry of the stream `requests` exists exactly while the request is live.

    Attributes:
        digest: hash of the content; the same id with another digest is refused.
        prompt_ids: packed ids.
        sampling: None is greedy sampling without penalties, the fast path.
        top_n_tokens: number of likeliest tokens returned with each token.
        prompt_logprobs: number of likeliest tokens returned at each place of the prompt, with the model's own
            log-probabilities of the prompt's tokens; None returns nothing of the prompt.
        ttl_ms: time to its deadline, counted from the time in the entry's id: it bounds `goes_on_ms`.
        channel: pub/sub channel of the replies.
        gateway: the gateway that serves it; empty for a request that goes on up to its deadline.
        goes_on_ms: how long it goes on after its gateway has died; then it is cancelled.
        kept_ms: how long its end and its tokens are kept, unless its gateway deletes them.
        num_shown: if a gateway queues it again: number of tokens that its client has; they are committed.
        cache_salt: requests with different salts share no KV blocks.
        block_hashes: hashes of the prompt (`extend_hashes`), from the root on; empty where the request shares
            no KV blocks.
        class_name: its service class; empty for the default.
        tenant: whose request it is.
        num_choices: number of choices of its answer; each is a request with the same prompt.
        logits: the logits that it returns; None returns none.
        beams: None is no beam search. One has no tokens before its end, then those of all its sequences
            (records.py).
        traceparent: the span that it is part of, by W3C's name; empty where its trace is not sampled.
        key_id: public id of the API key that its client sent; empty where there are no keys.
        weight: of its tenant, from the API key; 0 is that of TENANT_WEIGHTS.
        account: None where a gateway of an earlier version has admitted it: then it is not counted.
        adapter: name of the LoRA adapter with which it is computed; empty for the model alone.
        pictures: those of its prompt, in the order of their places.
        pooling: it ends with its prompt, and its answer is a vector, which travels as its `logits`; None
            generates tokens.
        webhook: where the event of its end goes (api/webhooks.py); its entry in the queue does not have
            it. Empty for none.
    """

    request_id: str = wire_field("id")
    digest: str = wire_field("dg")
    prompt_ids: bytes = wire_field("p")
    stopping: StoppingParams = wire_field("sp")
    sampling: SamplingParams | None = wire_field("sa", default=None)
    top_n_tokens: int = wire_field("tp", default=0)
    prompt_logprobs: int | None = wire_field("pl", default=None)
    ttl_ms: int = wire_field("tl", default=600_000)
    channel: str = wire_field("ch", default="")
    gateway: str = wire_field("gw", default="")
    goes_on_ms: int = wire_field("gr", default=0)
    kept_ms: int = wire_field("rt", default=60_000)
    class_name: str = wire_field("cl", default="")
    tenant: str = wire_field("tn", default="")
    num_shown: int = wire_field("sh", default=0)
    cache_salt: str = wire_field("cs", default="")
    block_hashes: bytes = wire_field("bh", default=b"")
    num_choices: int = wire_field("ns", default=1)
    beams: BeamParams | None = wire_field("bm", default=None)
    logits: LogitsParams | None = wire_field("lo", default=None)
    traceparent: str = wire_field("tr", default="")
    key_id: str = wire_field("ky", default="")
    weight: float = wire_field("we", default=0.0)
    account: UsageAccount | None = wire_field("ac", default=None)
    adapter: str = wire_field("ad", default="")
    pictures: list[Picture] = wire_field("pi", default_factory=list)
    pooling: PoolingParams | None = wire_field("po", default=None)
    webhook: bytes = wire_field("wh", default=b"")

    @property
    def service_class(self) -> str:
        return service_class(self.class_name)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) // 4

    @property
    def account_text(self) -> str:
        """Its account as the scripts read it (`read_account` in usage.lua); empty without one."""
        if (account := self.account) is None:
            return ""
        num_paid = self.num_prompt if account.pays_prompt else 0
        num_first = self.stopping.max_new_tokens * self.beams.num_returned if self.beams else 1
        num_first = 0 if self.pooling else num_first
        # the zeros are the prices and the budget of money that scripts of earlier versions read
        numbers = f"{num_paid} {num_first} 0 0 0 {account.budget_tokens} 0"
        return f"{numbers}\n{self.key_id}\n{self.tenant}\n{account.model}"

    @property
    def max_kv(self) -> int:
        """The most tokens whose KV it needs: its last one is never computed."""
        return self.num_prompt + self.stopping.max_new_tokens - 1

    @property
    def logits_bytes(self) -> int:
        """The most bytes of logits that it returns."""
        most = self.stopping.max_new_tokens
        return self.logits.num_bytes(self.num_prompt, most) if self.logits else 0

    @property
    def width(self) -> int:
        """Records of one token: its own, then one for each of the likeliest tokens."""
        return 1 + self.top_n_tokens


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancels a request: its client is gone, or asked for it."""

    request_id: str = wire_field("id")
    why: str = wire_field("w")


@dataclass(frozen=True, slots=True)
class Resume:
    """A request goes on from what is committed; what its run has made since is void."""

    request_id: str = wire_field("id")


HASHED_TOKENS = 16
HASH_BYTES = 16
PIECE_BYTES = 4 * HASHED_TOKENS


def root_hash(salt: str, adapter: str = "") -> bytes:
    """Return the hash before the first token. No salt gives that of another adapter: adapters are keys of it.

    Args:
        adapter: its key, which changes with its files; empty for the model alone.
    """
    key = blake2b(adapter.encode(), digest_size=HASH_BYTES).digest() if adapter else b""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=HASH_BYTES, key=key).digest()


def extend_hashes(hashes: bytes, ids: bytes, pictures: Sequence[Picture] = ()) -> bytes:
    """Return the root and the hashes of all whole pieces of packed `ids`, of which `hashes` has the first.
    `pictures`: all those that have placeholders among the ids.
    """
    num_hashed = len(hashes) // HASH_BYTES - 1  # the root is of no piece
    last, parts = hashes[-HASH_BYTES:], [hashes]
    for begin in range(num_hashed * PIECE_BYTES, len(ids) - PIECE_BYTES + 1, PIECE_BYTES):
        seen = pictures_at(begin // 4, pictures) if pictures else b""
        last = blake2b(last + ids[begin : begin + PIECE_BYTES] + seen, digest_size=HASH_BYTES).digest()
        parts.append(last)
    return b"".join(parts)


def pictures_at(start: int, pictures: Sequence[Picture]) -> bytes:
    """Return the digests of the pictures that have a placeholder in the piece that begins at `start`, with
    where they begin.
    """
    end = start + HASHED_TOKENS
    seen = [one for one in pictures if one.start < end and one.start + one.num_tokens > start]
    return "".join(f" {one.digest} {one.start}" for one in seen).encode()


def prompt_hashes(request: Generate) -> bytes:
    """Return the root and the hashes of a request's prompt."""
    root = root_hash(request.cache_salt, request.adapter)
    return extend_hashes(root, request.prompt_ids, request.pictures)


def block_names(hashes: bytes, block_size: int) -> list[bytes]:
    """Return the names of the blocks that the hashed pieces fill; HASHED_TOKENS divides `block_size`.

    Without hashes, not even a root, there are none.
    """
    step = block_size // HASHED_TOKENS * HASH_BYTES
    return [hashes[end - HASH_BYTES : end] for end in range(HASH_BYTES + step, len(hashes) + 1, step)]
