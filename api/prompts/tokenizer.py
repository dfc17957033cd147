"""Model tokenizer: prompts to token ids, with the model's special tokens and chat template.

Text budget: how much text one gateway tokenizes at once, because a byte takes some two hundred bytes of
memory until its tokens are rendered.
"""

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from api.event_loop import LONG_SIZE
from api.prompts.chat_template import ChatTemplate
from api.prompts.control_texts import ControlTexts, PlainCopy, Rendered, TextBound, control_texts, text_bound
from common import model_config
from common.settings.fields import SettingFields

Result = TypeVar("Result")

SHORT_BYTES = 2**16
"""Texts up to this have a lane of their own, so that none of them waits for seconds behind long ones."""


class Lane:
    """Bytes of texts that are tokenized at once, first come, first served. A text that is larger than the
    lane has it alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> int:
        """Return the bytes that were taken, which `release` gives back."""
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
        self.start_next()

    def start_next(self) -> None:
        while self.waiting and self.num_bytes + self.waiting[0][0] <= self.max_bytes:
            size, turn = self.waiting.popleft()
            self.num_bytes += size
            turn.set_result(None)


class TextBudget:
    """Runs work on texts: short work at once, longer work in a thread, when its lane has room."""

    def __init__(self, max_bytes: int = SettingFields().max_tokenized_bytes) -> None:
        self.short = Lane(max_bytes // 4)
        self.long = Lane(max_bytes - max_bytes // 4)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on so many bytes, or its exception. A caller that is cancelled leaves its room
        when its work has ended, because a thread cannot be stopped.
        """
        if size < LONG_SIZE:
            return work()
        is_short = size <= SHORT_BYTES
        lane = self.short if is_short else self.long
        taken = await lane.acquire(size)
        thread = asyncio.ensure_future(asyncio.to_thread(work if is_short else then_trimmed(work)))
        thread.add_done_callback(lambda _: lane.release(taken))
        return await asyncio.shield(thread)


def then_trimmed(work: Callable[[], Result]) -> Callable[[], Result]:
    """The work, and then its memory goes back to the system: glibc keeps what a thread has freed for that
    thread's next work.
    """

    def run() -> Result:
        try:
            return work()
        finally:
            trim_memory()

    return run


def trim_memory() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc; others give memory back by themselves
        libc.malloc_trim(0)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True, slots=True, eq=False)
class ModelTokenizer:
    """A model's tokenizer, its special ids, and its chat template. Grammars know it as their vocabulary.

    Attributes:
        backend: the tokenizer of the library `tokenizers`.
        special_ids: ids that are control, not text.
        ending_ids: the model's end-of-sequence ids: no other special token ends a generation by itself.
        controls: control texts that stay text where a client writes them in messages.
        plain: gives the copy that tokenizes prompts with such texts; it is made when one comes.
        chat_template: None if the model has none.
        sampling_defaults: what /v1 takes where a request says nothing (GENERATION_CONFIG).
        budget: how much text this gateway tokenizes at once, with all its tokenizers.
        bound: how many tokens a text has at least; None where that is not known without tokenizing it.
    """

    backend: Tokenizer
    special_ids: frozenset[int]
    ending_ids: frozenset[int]
    controls: ControlTexts
    plain: Callable[[], PlainCopy]
    chat_template: ChatTemplate | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    budget: TextBudget = field(default_factory=TextBudget)
    bound: TextBound | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        tokenizer_config_path: str | None = None,
        chat_template_path: str | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        budget: TextBudget | None = None,
        control_tokens_in_messages: bool = False,
    ) -> "ModelTokenizer":
        """Load the tokenizer of the model in the directory `path`. Raises SettingError."""
        tokenizer = model_config.read_tokenizer(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special_ids = model_config.special_ids(path)
        chat_template = ChatTemplate.load(path, tokenizer_config_path, chat_template_path)
        ending_ids = frozenset(model_config.eos_ids(path))
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
        is_one = len(ids) == 1 and self.backend.decode(ids, skip_special_tokens=False) == text
        return ids[0] if is_one else None

    async def run(self, prompt: Rendered, work: Callable[[], Result]) -> Result:
        """The result of work that tokenizes a prompt, or its exception; if the prompt is long, in a thread,
        when the gateway's budget has room for it.
        """
        if prompt.guarded is not None:
            await asyncio.to_thread(self.plain)
        return await self.budget.run(utf8_size(prompt.text), work)

    async def encode_prompt(self, prompt: Rendered, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises ApiError."""
        return await self.run(prompt, lambda: self.encode_rendered(prompt, add_special_tokens))

    def encode_rendered(self, prompt: Rendered, add_special_tokens: bool) -> list[int]:
        if prompt.guarded is None:
            return self.encode(prompt.text, add_special_tokens)
        ids: list[int] = self.plain().encode(prompt.guarded, add_special_tokens).ids
        return ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw text, in which the texts of control tokens are those tokens."""
        # Unlike `encode`, `encode_batch_fast` releases the GIL.
        encoded = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def spans(self, prompt: Rendered, add_special_tokens: bool) -> Iterator[tuple[int, int, int]]:
        """(id, start, end) of a prompt's tokens, in characters of the text. Tokens that share a character
        all span it; special tokens that were added span nothing. Raises ApiError.
        """
        if prompt.guarded is None:
            encoded = self.backend.encode_batch([prompt.text], add_special_tokens=add_special_tokens)[0]
        else:
            encoded = self.plain().encode(prompt.guarded, add_special_tokens)
        for place, token_id in enumerate(encoded.ids):
            # One by one: a list of all offsets would be larger than the encoding.
            start, end = encoded.token_to_chars(place) or (0, 0)
            yield token_id, start, end

    def spellings(self, word: str) -> list[list[int]]:
        """Ids of a word at the start of a text and after a space; each spelling once."""
        found = [self.encode(text, add_special_tokens=False) for text in (word.lstrip(), f" {word.lstrip()}")]
        return [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]
