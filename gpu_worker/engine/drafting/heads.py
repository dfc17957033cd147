"""Heads that draft from the model's last hidden state of a row: they cache nothing.

Medusa (arXiv:2401.10774): each head proposes the token at one place after the next, from that state alone.
MLP speculator (arXiv:2404.19124; checkpoints of ibm-fms and ibm-ai-platform): a recurrent state of the last
hidden state and of the tokens proposed so far.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.row import RowSlice, request_at
from gpu_worker.engine.drafting.draft_model import DraftSampler
from gpu_worker.engine.drafting.drafter import DraftRow, DraftSource, draft_proposer_of
from gpu_worker.engine.drafting.eagle import HiddenStates
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.model.warmup import fastest_ms
from gpu_worker.protocol import UnservableModel


class MedusaHeads(nn.Module):
    """The heads of one checkpoint.

    Attributes:
        num_heads: tokens proposed at a time.
    """

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_heads))

    @classmethod
    def of(cls, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> "MedusaHeads":
        """Raises UnservableModel."""
        num_heads, num_layers = (
            config.get("medusa_num_heads") or config.get("num_heads"),
            config.get("medusa_num_layers", config.get("num_hidden_layers", 1)),
        )
        if not isinstance(num_heads, int) or not isinstance(num_layers, int):
            raise UnservableModel("its config.json has no medusa_num_heads")
        if config.get("truncated_vocab_size") not in (None, vocab_size):
            raise UnservableModel("its heads know a part of the vocabulary only")
        return cls(num_heads, num_layers, hidden_size, vocab_size)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names of parameters → those in checkpoints: of Medusa itself and TGI, and of vLLM."""
        last = self.num_layers
        found: dict[str, Sequence[str]] = {}
        for head in range(self.num_heads):
            for layer in range(last):
                for part in ("weight", "bias"):
                    own = f"{head}.{layer}.linear.{part}"
                    names = (own, f"medusa_head.{own}", f"blocks.{head}.layers.{layer}.{part}")
                    found[f"blocks.{head}.{layer}.{part}"] = names
            own = f"{head}.{last}.weight"
            found[f"heads.{head}.weight"] = (own, f"medusa_head.{own}", f"lm_heads.{head}.weight")
        return found

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] of the model's dtype → what `logits` takes."""
        return states

    def logits(
        self, place: int, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [rows, hidden], tokens int64 [rows] before this place → logits [rows, vocabulary], and the
        states for the next place.
        """
        hidden = states
        for block in self.blocks[place]:  # type: ignore[attr-defined]
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.heads[place](hidden), states


EPSILON = 1e-6
PARTS = ("emb", "proj", "head", "ln")


class ShiftedNorm(nn.Module):
    """An L2 norm with weights and biases: [..., size] of any dtype → the same shape"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * normalized(states) + self.bias


def normalized(states: torch.Tensor) -> torch.Tensor:
    """[..., size] of any dtype → the same with a mean square of 1"""
    scale = torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + EPSILON)
    return (states.float() * scale).type_as(states)


class MlpSpeculatorHeads(nn.Module):
    """The heads of one checkpoint.

    Attributes:
        num_heads: tokens proposed at a time.
        tied: all places have the same weights, but for the first projection.
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        inner: int,
        vocab_size: int,
        tied: bool = False,
        scales_input: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.tied = tied
        self.scales_input = scales_input
        number = 1 if tied else num_heads
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(number))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(number))
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(number))
        sizes = [hidden_size, *[inner] * ((min(2, num_heads) if tied else num_heads) - 1)]
        self.proj = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in sizes)
        self.state_weight = 0.5 ** (0.5 / num_heads)
        self.token_weight = math.sqrt(1 - self.state_weight**2) * math.sqrt(inner / 2)

    @classmethod
    def of(cls, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> "MlpSpeculatorHeads":
        """Raises UnservableModel."""
        num_heads, inner = config.get("n_predict"), config.get("inner_dim") or config.get("emb_dim")
        if not isinstance(num_heads, int) or not isinstance(inner, int):
            raise UnservableModel("its config.json has no n_predict and inner_dim")
        for name, size in (("emb_dim", hidden_size), ("vocab_size", vocab_size)):
            if config.get(name, size) != size:
                raise UnservableModel(f"its {name} is {config[name]}, and the model's {size}")
        tied, scales = bool(config.get("tie_weights")), bool(config.get("scale_input"))
        return cls(num_heads, hidden_size, inner, vocab_size, tied, scales)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names of parameters → those in checkpoints."""
        return {name: (f"speculator.{name}", name) for name, _ in self.named_parameters()}

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] of the model's dtype → what `logits` takes."""
        return normalized(states) * 2**-0.5 if self.scales_input else states

    def logits(
        self, place: int, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [rows, hidden or inner], tokens int64 [rows] before this place → logits [rows, vocabulary],
        and the states for the next place.
        """
        part = 0 if self.tied else place
        projected = self.proj[min(place, len(self.proj) - 1)](states) * self.state_weight
        states = self.ln[part](projected + self.emb[part](tokens) * self.token_weight)
        states = nn.functional.gelu(states)
        return self.head[part](states), states


class HeadSource(DraftSource):
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
        weight = next(self.heads.parameters())
        hidden = self.states.recorded[0].shape[1]
        states = self.heads.begin(weight.new_zeros(num_rows, hidden))
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        return fastest_ms(lambda: self.heads.logits(0, states, tokens), self.device)


def last_state(proposer: Proposer) -> torch.Tensor | None:
    """The state [hidden] of the model's dtype that gave the row's last token; None if it was not kept."""
    if proposer.states is None:
        return None
    begin, states = proposer.states
    place = proposer.text.length - 2 - begin
    return states[place] if 0 <= place < len(states) else None
