"""Late text: the texts of tokens that came without them, as the worker would have sent them."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from common.detokenize import Detokenizer


class LateText:
    """Detokenizes in one stream what came without its text; the tokens before that are only passed over.

    Attributes:
        num_seen: how many of the stream's tokens the detokenizer has seen.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.prompt_ids = prompt_ids
        self.detokenizer: Detokenizer | None = None
        self.num_seen = 0

    def see(self, ids: Sequence[int], num_tokens: int) -> bool:
        """See some more of the stream's `ids`. Returns whether there are others, not seen yet."""
        self.detokenizer = self.detokenizer or Detokenizer(self.tokenizer, self.prompt_ids)
        for token_id in ids[self.num_seen : self.num_seen + num_tokens]:
            self.detokenizer.step(token_id)
            self.num_seen += 1
        return self.num_seen < len(ids)

    def texts(self, ids: Sequence[int], new_ids: Sequence[int]) -> list[str]:
        """The texts of `new_ids`, which come after `ids`."""
        self.see(ids, len(ids))
        assert self.detokenizer is not None
        self.num_seen += len(new_ids)
        return [self.detokenizer.step(token_id) for token_id in new_ids]
