"""Heads that draft from the model's last hidden state of a row: they cache nothing."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.row import RowSlice, request_at
from gpu_worker.engine.cuda.graphs import Capture
from gpu_worker.engine.drafting.draft_sampler import DraftSampler
from gpu_worker.engine.drafting.drafter import DraftProposer, DraftRow, draft_proposer_of
from gpu_worker.engine.drafting.hidden_states import HiddenStates
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.model.warmup import fastest_ms


class HeadSource:
    """Drafts by heads.

    Attributes:
        heads: MedusaHeads, or others with their methods.
        states: inputs of the model's output layer.
    """

    def __init__(self, draft: Draft, target: LoadedModel, sampler: DraftSampler) -> None:
        self.heads: Any = draft.model
        self.sampler = sampler
        self.device = target.device
        self.states = HiddenStates([target.model.get_output_embeddings()], draft.max_states, target.device)

    def on_forward(self, slices: Sequence[RowSlice]) -> None:
        """Keep the states from which rows sample: which of them is the last one is known once the step is
        read.
        """
        states = self.states.newest(sum(row_slice.num_logits for row_slice in slices))
        begin = 0
        for row_slice in slices:
            begin += row_slice.num_logits
            proposer = draft_proposer_of(row_slice.row)
            if row_slice.samples and proposer and not proposer.acceptance.is_paused:
                number = row_slice.num_samples
                kept = states[begin - number : begin]
                proposer.states = (row_slice.kv_len - number, kept.clone() if kept.is_cuda else kept)

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        found = {
            place: state for place, one in enumerate(rows) if (state := last_state(one.proposer)) is not None
        }
        if not found:
            return drafts
        places = list(found)
        states = self.heads.begin(torch.stack([*found.values()]))
        tokens = [rows[place].proposer.text.last for place in places]
        sampling = [rows[place].row.sampling_state for place in places]
        for step in range(max(rows[place].count for place in places)):
            logits, states = self.heads.logits(step, states, to_device(tokens, self.device))
            requests = [
                request_at(state, rows[place].row.index + step)
                for place, state in zip(places, sampling, strict=True)
            ]
            tokens = self.sampler.sample(logits, requests)
            sampling = [state and state.after(token) for state, token in zip(sampling, tokens, strict=True)]
            for place, token in zip(places, tokens, strict=True):
                if step < rows[place].count:
                    drafts[place].append(token)
        return drafts

    @torch.inference_mode()
    def measure_ms(self, num_rows: int) -> float:
        """ms of one draft for each of so many rows."""
        weight = next(self.heads.parameters())
        hidden = self.states.recorded[0].shape[1]
        states = self.heads.begin(weight.new_zeros(num_rows, hidden))
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        return fastest_ms(lambda: self.heads.logits(0, states, tokens), self.device)

    def on_granted(self, blocks: Iterable[int]) -> None:
        """Nothing is cached."""

    def on_sleep(self) -> None:
        """Nothing is cached."""

    def capture(self, capture: Capture, max_rows: int) -> None:
        """Heads are few operations: nothing is captured."""


def last_state(proposer: DraftProposer) -> torch.Tensor | None:
    """The state [hidden] of the model's dtype that gave the row's last token; None if it was not kept."""
    if proposer.states is None:
        return None
    begin, states = proposer.states
    place = proposer.text.length - 2 - begin
    return states[place] if 0 <= place < len(states) else None
