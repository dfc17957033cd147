"""A top-p that shrinks with each token and is whole again after some of them: factual-nucleus sampling
(arXiv:2206.04624).
"""

from collections.abc import Iterable

from common.messages.request import SamplingParams


class TopPDecay:
    """`top_p` is that of the next token: times `top_p_decay` after each, not below `top_p_min`; as asked
    again after one of `top_p_reset_ids`. A function of the ids, so a resumed row finds it again.
    """

    def __init__(self, sampling: SamplingParams, generated: Iterable[int]) -> None:
        self.sampling, self.top_p = sampling, sampling.top_p
        self.reset_ids = frozenset(sampling.top_p_reset_ids)
        for token in generated:
            self.accept(token)

    def accept(self, token: int) -> None:
        smaller = max(
            self.top_p * self.sampling.top_p_decay, min(self.sampling.top_p_min, self.sampling.top_p)
        )
        self.top_p = self.sampling.top_p if token in self.reset_ids else smaller
