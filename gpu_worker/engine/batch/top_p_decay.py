"""Top-p decay: factual-nucleus sampling (arXiv:2206.04624), where top-p shrinks with each token until it is
reset.
"""

from collections.abc import Iterable

from common.messages.request import SamplingParams


class TopPDecay:
    """`top_p` of a row's next token: multiplied by `top_p_decay` after each token, not below `top_p_min`; the
    request's own again after one of `top_p_reset_ids`. A resumed row recomputes it from its ids.
    """

    def __init__(self, sampling: SamplingParams, generated: Iterable[int]) -> None:
        self.sampling = sampling
        self.top_p = sampling.top_p
        self.reset_ids = frozenset(sampling.top_p_reset_ids)
        for token in generated:
            self.accept(token)

    def accept(self, token: int) -> None:
        smaller = max(
            self.top_p * self.sampling.top_p_decay, min(self.sampling.top_p_min, self.sampling.top_p)
        )
        self.top_p = self.sampling.top_p if token in self.reset_ids else smaller
