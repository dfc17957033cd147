"""Model tokenizer: prompts to token ids, with the model's special tokens and chat template."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from api.event_loop.text_budget import TextBudget, utf8_size
from api.prompt_text.bounds import TextBound, text_bound
from api.prompt_text.control_texts import ControlTexts, Rendered, control_texts
from api.prompt_text.plain_copy import PlainCopy
from api.templates.chat_template import ChatTemplate
from common import model_config

Result = TypeVar("Result")


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
