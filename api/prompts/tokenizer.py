"""Model tokenizer: turns prompts into token ids, and has the model's special tokens and chat template.

A byte of text takes some two hundred bytes of memory until its tokens are rendered. So `TextBudget` limits
how much text a gateway tokenizes at once, and `TextBound` tells that a text has too many tokens without
tokenizing it.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer
from tokenizers.models import BPE

from api.event_loop import LONG_SIZE
from api.prompts.chat_template import ChatTemplate, ControlTexts, PlainCopy, Rendered, control_texts
from api.prompts.picture_layouts import PictureLayout, read_layout
from common import model_files
from common.process.machine import num_cores, return_memory

MAX_TOKENIZED_BYTES = 4_000_000
"""Text that a gateway tokenizes at once; more waits, and a text that is longer goes alone."""

Result = TypeVar("Result")

SHORT_BYTES = 2**16
"""Texts up to this size have a lane of their own: they do not wait for long ones, which take seconds."""
SHRINKS = {"Prepend": 1, "NFC": 4}
"""Normalizers → the most characters that become one; 4 is Unicode's longest composition."""
SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "Punctuation")
"""Pre-tokenizers that drop no character."""

BYTE_TOKENS = {f"<0x{number:02X}>" for number in range(256)}
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that ByteLevel writes as the character of the same number; the others follow in order from 256 on."""
BYTE_LEVEL = {chr(number): number for number in PRINTABLE} | {
    chr(256 + i): number for i, number in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}
"""ByteLevel's characters → bytes."""

# --- budget -------------------------------------------------------------------------------------------------


class Lane:
    """Room for `max_texts` texts, and `max_bytes` of them, that are tokenized at once; first come, first
    served. A larger text takes all the bytes.
    """

    def __init__(self, max_bytes: int, max_texts: int) -> None:
        self.max_bytes = max_bytes
        self.max_texts = max_texts
        self.num_bytes = 0
        self.num_texts = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> int:
        """Wait for room, and return the bytes taken: `release` gives them back."""
        size = min(size, self.max_bytes)
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append((size, turn))
        self.start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.waiting.remove((size, turn))
                self.start_next()
            else:
                self.release(size)
            raise
        return size

    def release(self, size: int) -> None:
        self.num_bytes -= size
        self.num_texts -= 1
        self.start_next()

    def start_next(self) -> None:
        while self.waiting and self.has_room(self.waiting[0][0]):
            size, turn = self.waiting.popleft()
            self.num_bytes += size
            self.num_texts += 1
            turn.set_result(None)

    def has_room(self, size: int) -> bool:
        return self.num_texts < self.max_texts and self.num_bytes + size <= self.max_bytes


class TextBudget:
    """Runs work on texts: up to LONG_SIZE at once, longer work in a thread when its lane has room.

    Attributes:
        num_threads: how many threads there are. Texts of the long lane leave one of them to the short lane,
            unless there is only one.
    """

    def __init__(self, max_bytes: int = MAX_TOKENIZED_BYTES, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or num_cores() + 1
        self.short = Lane(max_bytes // 4, self.num_threads)
        self.long = Lane(max_bytes - max_bytes // 4, max(1, self.num_threads - 1))
        self.threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="tokenize")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on `size` bytes, or its exception. If the caller is cancelled, its room is
        released when the work has ended, because a thread cannot be stopped.
        """
        if size < LONG_SIZE:
            return work()
        is_short = size <= SHORT_BYTES
        lane = self.short if is_short else self.long
        taken = await lane.acquire(size)
        loop = asyncio.get_running_loop()
        thread = loop.run_in_executor(self.threads, work if is_short else then_trimmed(work))
        thread.add_done_callback(lambda _: lane.release(taken))
        return await asyncio.shield(thread)


def then_trimmed(work: Callable[[], Result]) -> Callable[[], Result]:
    """`work`, after which its memory goes back to the system."""

    def run() -> Result:
        try:
            return work()
        finally:
            return_memory()

    return run


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


# --- bound --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextBound:
    """How many tokens a text has at least.

    Attributes:
        max_chars: the most characters that one token stands for.
        dropped: characters of which no token is made.
    """

    max_chars: int
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        num_chars = len(text) - sum(text.count(character) for character in self.dropped)
        return -(-num_chars // self.max_chars)


def text_bound(tokenizer: Tokenizer) -> TextBound | None:
    """The bound of a tokenizer; None if one token may stand for any number of characters."""
    splitters = [*parts_of(tokenizer.pre_tokenizer)]
    strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    dropped = dropped_characters(tokenizer, splitters)
    if strips or dropped is None or not all(map(keeps_characters, splitters)):
        return None
    shrinks = [shrink_of(one) for one in parts_of(tokenizer.normalizer)]
    if None in shrinks:
        return None
    # a token has a character for each character of its part of the text, or with ByteLevel for each byte
    longest = max(map(len, tokenizer.get_vocab())) * max([1, *(shrink for shrink in shrinks if shrink)])
    return TextBound(longest, dropped)


def dropped_characters(tokenizer: Tokenizer, splitters: Iterable[Mapping[str, Any]]) -> str | None:
    """Characters of which no token is made; None if any may be dropped, or if several unknown ones may become
    one token.
    """
    model = tokenizer.model
    if not isinstance(model, BPE):
        return None
    known = tokenizer.get_vocab().keys()
    if any(one["type"] == "ByteLevel" for one in splitters):
        unknown = BYTE_LEVEL.keys() - known
        # a character beyond ASCII begins with one of these bytes, so it has a token
        within = all(BYTE_LEVEL[spelled] < 0x80 or BYTE_LEVEL[spelled] >= 0xC0 for spelled in unknown)
        ascii_only = "".join(chr(BYTE_LEVEL[spelled]) for spelled in unknown if BYTE_LEVEL[spelled] < 0x80)
        return ascii_only if within else None
    if model.byte_fallback and known >= BYTE_TOKENS:
        return ""
    return "" if model.unk_token is not None and not model.fuse_unk else None


def parts_of(component: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as in tokenizer.json."""
    if component is not None:
        yield from flatten(json.loads(component.__getstate__()))


def flatten(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner = part.get("normalizers") or part.get("pretokenizers")
    if inner is None:
        yield part
    else:
        for one in inner:
            yield from flatten(one)


def keeps_characters(splitter: Mapping[str, Any]) -> bool:
    kind, behavior = splitter["type"], splitter.get("behavior")
    return behavior != "Removed" and (kind in SPLITTERS or kind == "Split")


def shrink_of(normalizer: Mapping[str, Any]) -> int | None:
    """The most characters that a normalizer turns into one; None if any number."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        keeps = replaced is not None and len(replaced) <= len(normalizer["content"])
        return 1 if keeps else None
    return SHRINKS.get(normalizer["type"])


# --- tokenizer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ModelTokenizer:
    """A model's tokenizer, its special ids and its chat template; for grammars it is the vocabulary.

    Attributes:
        backend: the tokenizer of the library `tokenizers`.
        special_ids: ids that are control, not text.
        ending_ids: the model's end-of-sequence ids: no other special token ends a generation by itself.
        controls: control texts that stay text if a client writes them in messages.
        plain: returns the copy that tokenizes prompts with such texts; it is made at the first call.
        chat_template: None if the model has none.
        sampling_defaults: defaults of /v1 (GENERATION_CONFIG).
        budget: shared by all tokenizers of this gateway.
        bound: how many tokens a text has at least; None if only tokenizing tells.
        starting_ids: ids that follow a prompt and start the decoder, of an encoder-decoder model.
        pictures: how pictures stand in prompts; None for models that see none.
    """

    backend: Tokenizer
    special_ids: frozenset[int]
    ending_ids: frozenset[int]
    controls: ControlTexts
    plain: Callable[[], PlainCopy]
    chat_template: ChatTemplate | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    budget: TextBudget = field(default_factory=TextBudget)
    bound: TextBound | None = None
    starting_ids: Sequence[int] = ()
    pictures: PictureLayout | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        tokenizer_path: Path | None = None,
        tokenizer_config_path: str | None = None,
        chat_template_path: str | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        budget: TextBudget | None = None,
        control_tokens_in_messages: bool = False,
    ) -> "ModelTokenizer":
        """Load the tokenizer of the model in the directory `path`, from `tokenizer_path` if it is another
        one. Raises SettingError.
        """
        own_path = tokenizer_path or path
        setting = "model_id" if own_path == path else "tokenizer_name"
        tokenizer = model_files.read_tokenizer(own_path, setting)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special_ids = model_files.special_ids(own_path)
        pictures = read_layout(path, own_path)
        inline = pictures.inline if pictures else None
        chat_template = ChatTemplate.load(own_path, tokenizer_config_path, chat_template_path, inline)
        ending_ids = frozenset(model_files.eos_ids(path, own_path))
        return cls(
            backend=tokenizer,
            special_ids=special_ids,
            ending_ids=ending_ids,
            controls=ControlTexts() if control_tokens_in_messages else control_texts(tokenizer),
            plain=cache(lambda: PlainCopy(tokenizer)),
            chat_template=chat_template,
            sampling_defaults=sampling_defaults or {},
            budget=budget or TextBudget(),
            bound=text_bound(tokenizer),
            starting_ids=model_files.starting_ids(path),
            pictures=pictures,
        )

    @property
    def size(self) -> int:
        """Size of the vocabulary: all ids are below it."""
        return self.backend.get_vocab_size()

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of control tokens by their texts."""
        texts = {token_id: self.backend.id_to_token(token_id) for token_id in self.special_ids}
        return {text: token_id for token_id, text in texts.items() if text is not None}

    def id_of(self, text: str) -> int | None:
        """The id of the token that has this text; None if there is no such token."""
        ids = self.encode(text, add_special_tokens=False)
        is_one = len(ids) == 1 and self.text_of(ids) == text
        return ids[0] if is_one else None

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        return str(self.backend.decode(ids, skip_special_tokens=False))

    async def run(self, prompt: Rendered, work: Callable[[], Result]) -> Result:
        """The result of work that tokenizes a prompt, or its exception; a long prompt's runs in a thread when
        the budget has room for it.
        """
        if prompt.guard:
            await asyncio.to_thread(self.plain)
        return await self.budget.run(utf8_size(prompt.text), work)

    async def encode_prompt(self, prompt: Rendered, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises ApiError."""
        return await self.run(prompt, lambda: self.encode_rendered(prompt, add_special_tokens))

    def encode_rendered(self, prompt: Rendered, add_special_tokens: bool) -> list[int]:
        if not prompt.guard:
            return self.encode(prompt.text, add_special_tokens)
        ids: list[int] = self.plain().encode(prompt, add_special_tokens).ids
        return ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw text; texts of control tokens in it become those tokens."""
        # Unlike `encode`, `encode_batch_fast` releases the GIL.
        encoded = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def spans(self, prompt: Rendered, add_special_tokens: bool) -> Iterator[tuple[int, int, int]]:
        """(id, start, end) of a prompt's tokens, in characters of the text. Tokens that share a character all
        span it; added special tokens span nothing. Raises ApiError.
        """
        if not prompt.guard:
            encoded = self.backend.encode_batch([prompt.text], add_special_tokens=add_special_tokens)[0]
        else:
            encoded = self.plain().encode(prompt, add_special_tokens)
        for index, token_id in enumerate(encoded.ids):
            # one by one: a list of all offsets would be larger than the encoding
            start, end = encoded.token_to_chars(index) or (0, 0)
            yield token_id, start, end

    def spellings(self, word: str) -> list[list[int]]:
        """Ids of a word at the start of a text and after a space; each spelling once."""
        found = [self.encode(text, add_special_tokens=False) for text in (word.lstrip(), f" {word.lstrip()}")]
        return [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]
