"""Drafts by EAGLE-3: a layer with a cache of its own, whose blocks are those of the rows.

The layer is computed at each position once the token after it is known: for chunks of prompts along with
them, for other tokens before the next draft. A row that pauses goes on with it, some tokens at a time. States
of tokens that other rows have computed are not there: a row that starts with their blocks drafts only if
these hold the layer's K and V.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import Row, RowSlice, arrange
from gpu_worker.engine.cuda.graphs import Capture
from gpu_worker.engine.drafting.draft_model import ModelSource
from gpu_worker.engine.drafting.draft_sampler import DraftSampler
from gpu_worker.engine.drafting.drafter import DraftProposer, DraftRow, draft_proposer_of
from gpu_worker.engine.drafting.hidden_states import HiddenStates
from gpu_worker.engine.model.model import LoadedModel

MAX_WAITING = 16
"""Tokens of a row whose states wait for the layer, at most, while it pauses."""
MAX_MISSING = 16
"""Tokens before those of a row whose K and V may be missing: the last ones of the row that had the blocks."""


class EagleSource(ModelSource):
    """Drafts by the layer.

    Attributes:
        states: inputs of three of the model's layers.
        inputs: by row, as drafting sees it, hidden states [tokens, hidden] of its next slice.
    """

    def __init__(
        self, loaded: LoadedModel, sampler: DraftSampler, layers: Sequence[Any], max_states: int
    ) -> None:
        super().__init__(loaded, sampler)
        self.layer: Any = loaded.model
        self.states = HiddenStates(layers, max_states, loaded.device)
        self.inputs: dict[Row, torch.Tensor] = {}

    @torch.inference_mode()
    def on_forward(self, slices: Sequence[RowSlice]) -> None:
        """Keep the states of a step, and compute the layer where the tokens after them are known."""
        states = self.states.newest(sum(row_slice.count for row_slice in slices))
        pieces, begin = [], 0
        for row_slice in slices:
            begin += row_slice.count
            proposer = draft_proposer_of(row_slice.row)
            if proposer is None:
                continue
            keep_states(proposer, row_slice.begin, states[begin - row_slice.count : begin])
            waits_long = proposer.acceptance.is_paused and num_waiting(proposer) >= MAX_WAITING
            if (not row_slice.decodes or waits_long) and (piece := self.next_piece(row_slice.row, proposer)):
                pieces.append(piece)
        if pieces:
            self.forward(arrange(pieces))

    def catch_up(self, one: DraftRow, left: int) -> RowSlice | None:
        return self.next_piece(one.row, one.proposer)

    def next_piece(self, row: Row, proposer: DraftProposer) -> RowSlice | None:
        """The positions of a row that are not computed yet although the tokens after them are known; None if
        there are none, or if states before them are missing.
        """
        text, held = proposer.text, self.held_length(row, proposer)
        end = text.length - 1
        if proposer.states is None or proposer.states[0] > held + MAX_MISSING or held >= end:
            return None
        first, states = proposer.states
        held = max(held, first)
        self.table.note(row.blocks, end)
        following = text.known[1 : text.length]
        if end - held <= 2:  # as a row that decodes
            token, *rest = following[held:end].tolist()
            drafting = Row(row.number, following[:held], 0, 1, row.blocks, last_id=token)
            piece = RowSlice(drafting, held, end - held, True, proposed=rest)
        else:
            piece = RowSlice(Row(row.number, following, 0, 1, row.blocks), held, end - held, True)
        self.inputs[piece.row] = self.layer.fc(states[held - first : end - first])
        proposer.states = (end, states[end - first :])
        proposer.kv_len = end
        return piece

    @torch.inference_mode()
    def forward(self, slices: Sequence[RowSlice]) -> torch.Tensor:
        """→ logits float [slices, vocabulary], of the last token of each; its state is the input of the next
        one.
        """
        inputs = build_inputs(slices, self.block_size, self.loaded.device)
        states = torch.cat([self.inputs.pop(piece.row) for piece in slices])[None]
        self.loaded.backend.prepare_forward(inputs)
        ends = torch.tensor([piece.count for piece in slices]).cumsum(0) - 1
        ends = ends.to(self.loaded.device)
        output = self.layer(inputs.ids, inputs.positions, ends, states)
        for piece, state in zip(slices, output.states[0, ends], strict=True):
            self.inputs[piece.row] = state[None]
        return self.of_target(output.logits[0])

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        drafts = super().draft(rows)
        self.inputs.clear()
        for one in rows:  # drafted states are no states of the model
            if one.proposer.states and one.proposer.kv_len is not None:
                one.proposer.kv_len = min(one.proposer.kv_len, one.proposer.text.length - 1)
        return drafts

    def of_target(self, logits: torch.Tensor) -> torch.Tensor:
        """logits float [rows, draft vocabulary] → [rows, vocabulary of the model]"""
        ids = torch.arange(logits.shape[1], device=logits.device) + self.layer.draft_to_target
        lowest = torch.finfo(logits.dtype).min
        found = logits.new_full((len(logits), self.sampler.vocab_size), lowest)
        return found.index_copy_(1, ids, logits)

    def measure_ms(self, num_rows: int) -> float:
        hidden = self.layer.config.hidden_size
        weight = self.layer.norm.weight

        def forward(slices: Sequence[RowSlice]) -> torch.Tensor:
            self.inputs = {piece.row: weight.new_zeros(1, hidden) for piece in slices}
            return self.forward(slices)

        return self.time_single_tokens(forward, num_rows)

    def capture(self, capture: Capture, max_rows: int) -> None:
        """One layer is few operations: nothing is captured."""


def keep_states(proposer: DraftProposer, begin: int, states: torch.Tensor) -> None:
    """Keep hidden states [tokens, any] of the model's dtype from a position on, in place of earlier ones."""
    states = states.clone() if states.is_cuda else states
    if proposer.states is not None:
        first, earlier = proposer.states
        if first <= begin <= first + len(earlier):
            begin, states = first, torch.cat((earlier[: begin - first], states))
    proposer.states = (begin, states)


def num_waiting(proposer: DraftProposer) -> int:
    """How many states are kept."""
    return len(proposer.states[1]) if proposer.states else 0
