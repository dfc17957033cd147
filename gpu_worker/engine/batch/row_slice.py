"""Slices of rows: what one step computes of each. No tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState


@dataclass(slots=True)  # not frozen: to make one would take twice as long
class RowSlice:
    """What one step computes of a row: positions `begin` to `begin + count - 1`, then a sample where
    `samples`, and one more behind each of its proposals.

    Attributes:
        source_place: where its input is sampled by a step that is not read yet: the place among that step's
            samples.
        num_scored: tokens of the prompt whose log-probabilities are reported, from position `begin + 1` on.
        proposed: of a row that decodes: its last `proposed` positions hold these ids, which count as far as
            the samples before them are the same.
        num_returns: of its row, as of its launch.
    """

    row: Row
    begin: int
    count: int
    samples: bool
    source_place: int | None = None
    num_scored: int = 0
    proposed: Sequence[int] = ()
    num_returns: int = 0

    @property
    def decodes(self) -> bool:
        return self.begin >= len(self.row.ids)

    @property
    def kv_len(self) -> int:
        """Tokens of the row whose KV is written once the slice is computed."""
        return self.begin + self.count

    @property
    def num_samples(self) -> int:
        return self.samples + len(self.proposed)

    @property
    def num_logits(self) -> int:
        """Number of tokens, up to its last, whose logits are needed: the scored ones, then those to sample
        behind.
        """
        return self.num_scored + self.num_samples

    @property
    def is_void(self) -> bool:
        """Whether its row goes on before it: proposals were wrong that it took for right. What it wrote into
        the cache is written again.
        """
        return self.num_returns != self.row.num_returns

    @property
    def is_unsure(self) -> bool:
        """Whether nobody can tell, until it is read, behind how many of its proposals the row goes on."""
        proposer = self.row.proposer
        return bool(self.proposed) and proposer is not None and not proposer.is_sure

    @property
    def first_index(self) -> int:
        """Index of the token of its first sample."""
        return self.kv_len - len(self.proposed) - (len(self.row.ids) - self.row.base)

    @property
    def sample_request(self) -> SampleRequest | None:
        """How the first sample is drawn. None is greedy without penalties."""
        return request_at(self.row.sampling_state, self.first_index)

    @property
    def sample_requests(self) -> list[SampleRequest | None]:
        """How all samples are drawn: each as if all proposals before it were right."""
        state, requests = self.row.sampling_state, [self.sample_request]
        for index, token in enumerate(self.proposed, self.first_index + 1):
            state = state and state.after(token)
            requests.append(request_at(state, index))
        return requests


def request_at(state: SamplingState | None, index: int) -> SampleRequest | None:
    """How the token of this index is sampled; None is greedy without penalties."""
    return SampleRequest(state, index) if state and state.applies_at(index) else None


def confirmed(sampled: Sequence[int], proposed: Sequence[int]) -> list[int]:
    """Return the sampled ids that count: the first, and each behind a proposal that was sampled, too."""
    wrong = (place for place, (token, one) in enumerate(zip(sampled, proposed, strict=False)) if token != one)
    return list(sampled[: 1 + next(wrong, len(proposed))])


def arrange(slices: Sequence[RowSlice]) -> list[RowSlice]:
    """Put slices in the order of a step's tokens: rows that decode, longest first, then chunks of prompts as
    they come.
    """
    decoding = [row_slice for row_slice in slices if row_slice.decodes]
    prompts = [row_slice for row_slice in slices if not row_slice.decodes]
    return sorted(decoding, key=attrgetter("begin"), reverse=True) + prompts


def decode_slice(row: Row, room: int, recompute_length: int | None) -> RowSlice:
    """A token of a row that decodes, and proposals as far as there is room for them, and its rotary
    frequencies stay as they are.
    """
    begin = row.kv_len
    if recompute_length and begin < recompute_length:
        room = min(room, recompute_length - begin)
    proposed = row.propose(room - 1)
    source_place = row.sample_place if row.num_unread else None
    return RowSlice(
        row, begin, 1 + len(proposed), True, source_place, proposed=proposed, num_returns=row.num_returns
    )


def place_samples(slices: Sequence[RowSlice]) -> None:
    """Tell each row the place of its last token among those that a step samples."""
    end = 0
    for row_slice in slices:
        end += row_slice.num_samples
        row_slice.row.sample_place = end - 1
