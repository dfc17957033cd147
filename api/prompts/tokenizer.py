"""Model tokenizer: turns prompts into token ids, and has the model's special tokens and chat template.

A byte of text takes some two hundred bytes of memory until its tokens are rendered. So `TextBudget` limits
how much text a gateway tokenizes at once, and of a text that is far too long only the beginning is tokenized.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llguidance
from tokenizers import Tokenizer, models

from api.event_loop import LONG_SIZE
from api.prompts.chat_template import ChatTemplate, ControlTexts, PlainCopy, Rendered, control_texts
from api.prompts.picture_layouts import read_layout
from common import model_files
from common.process.machine import num_cores, return_memory
from common.settings.ranges import Defaults, read_defaults
from common.settings.settings import SettingError, Settings

Result = TypeVar("Result")

SHORT_BYTES = 2**16
"""Texts up to this size do not wait for long ones, which take seconds."""
MAX_LONG = 2
"""Long texts that a gateway tokenizes at once, first come, first served."""
CHARS_OF_TOKEN = 8
"""Nearly all texts have more tokens than one for so many characters."""
NUM_BEYOND = 1024
"""The beginning of a text has at most so many tokens more than the text: where it is cut, others end."""
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that ByteLevel writes as the character of the same number; the others follow in order from 256 on."""
BYTE_LEVEL = {chr(number): number for number in PRINTABLE} | {
    chr(256 + i): number for i, number in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}
"""ByteLevel's characters → bytes."""

# --- budget -------------------------------------------------------------------------------------------------


class TextBudget:
    """Runs work on texts: up to LONG_SIZE at once, longer work in a thread.

    Attributes:
        num_threads: how many threads there are.
        long: room for MAX_LONG texts beyond SHORT_BYTES; one thread is left to short ones, if there are
            several.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or num_cores() + 1
        self.long = asyncio.Semaphore(max(1, min(MAX_LONG, self.num_threads - 1)))
        self.threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="tokenize")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on `size` bytes, or its exception. If the caller is cancelled, its room is
        released when the work has ended, because a thread cannot be stopped.
        """
        if size < LONG_SIZE:
            return work()
        loop = asyncio.get_running_loop()
        if size <= SHORT_BYTES:
            return await loop.run_in_executor(self.threads, work)
        await self.long.acquire()
        thread = loop.run_in_executor(self.threads, then_trimmed(work))
        thread.add_done_callback(lambda _: self.long.release())
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


# --- tokenizer ----------------------------------------------------------------------------------------------


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
        num_embedded: the model has embeddings of the ids below it; its tokenizer may have more.
        starting_ids: ids that follow a prompt and start the decoder, of an encoder-decoder model.
        pictures: how pictures stand in prompts; None for models that see none.
        takes_grammars: whether workers can follow grammars.
    """

    def __init__(self, settings: Settings, budget: TextBudget | None = None) -> None:
        """Load the tokenizer of the settings' model. Raises SettingError."""
        # A gateway tokenises one prompt at a time: a thread pool would only cost.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        path = model_files.resolve(settings.model_id, settings.revision, dtype=settings.dtype)
        own_path = model_files.find_tokenizer(settings.tokenizer_name, path, dtype=settings.dtype)
        setting = "model_id" if own_path == path else "tokenizer_name"
        self.backend = backend = model_files.read_tokenizer(own_path, setting)
        backend.no_truncation()
        backend.no_padding()
        self.special_ids = model_files.special_ids(own_path)
        self.ending_ids = frozenset(model_files.eos_ids(path, own_path))
        self.controls = ControlTexts() if settings.control_tokens_in_messages else control_texts(backend)
        self.plain = cache(lambda: PlainCopy(backend))
        self.takes_grammars = takes_grammars(backend)
        self.pictures = read_layout(path, own_path)
        placeholder = self.pictures.placeholder_id if self.pictures else -1  # pictures replace its embedding
        self.num_embedded = max(model_files.num_embeddings(path) or sys.maxsize, placeholder + 1)
        inline = self.pictures.inline if self.pictures else None
        self.chat_template = ChatTemplate.load(
            own_path, settings.tokenizer_config_path, settings.chat_template, inline
        )
        self.sampling_defaults = load_sampling_defaults(path, settings)
        self.budget = budget or TextBudget(settings.validation_workers)
        self.starting_ids = model_files.starting_ids(path)
        return_memory()

    @property
    def size(self) -> int:
        """Size of the vocabulary: all ids are below it."""
        return self.backend.get_vocab_size()

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of control tokens by their texts."""
        texts = {token_id: self.backend.id_to_token(token_id) for token_id in self.special_ids}
        return {text: token_id for token_id, text in texts.items() if text is not None}

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        return str(self.backend.decode(ids, skip_special_tokens=False))

    async def run(self, prompt: Rendered, work: Callable[[], Result]) -> Result:
        """The result of work that tokenizes a prompt, or its exception; as the budget runs it."""
        if prompt.guard:
            await asyncio.to_thread(self.plain)
        return await self.budget.run(utf8_size(prompt.text), work)

    async def encode_prompt(
        self, prompt: Rendered, add_special_tokens: bool, most: int | None = None
    ) -> list[int]:
        """Token ids of a prompt; only those of its beginning where they are far more than `most`. Raises
        ApiError.
        """
        if most is not None and len(prompt.guarded) > (end := CHARS_OF_TOKEN * (most + NUM_BEYOND)):
            head = prompt._replace(guarded=prompt.guarded[:end])
            ids = await self.encode_prompt(head, add_special_tokens)
            if len(ids) > most + NUM_BEYOND:
                return ids
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


def takes_grammars(backend: Tokenizer) -> bool:
    """Whether llguidance reads a tokenizer, by how it writes the bytes of tokens."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    if backend.decoder is not None:
        tokenizer.decoder = backend.decoder
    try:
        llguidance.LLTokenizer(tokenizer.to_str())
    except ValueError:
        return False
    return True


def load_sampling_defaults(path: Path, settings: Settings) -> dict[str, Any]:
    """The sampling values of /v1 for the model in the directory `path`, as GENERATION_CONFIG,
    OVERRIDE_GENERATION_CONFIG and LOGPROBS_MODE say. Raises SettingError.
    """
    given = settings.generation_config
    directory = path if given == "auto" else Path(given).expanduser()
    file = directory / "generation_config.json"
    if given not in ("auto", "vllm") and not file.is_file():
        raise SettingError("generation_config", f"{file} does not exist")
    found = {} if given == "vllm" else model_files.read_json(file)
    defaults = read_defaults("generation_config", {name: found.get(name) for name in Defaults.model_fields})
    return defaults | settings.sampling_overrides | {"logprobs_mode": settings.logprobs_mode}
