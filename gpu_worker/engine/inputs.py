"""The parts of a step as tensors: one flat line of tokens, rows that decode first, then the chunks of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.rows import Int32, Part
from gpu_worker.engine.upload import upload

SPREAD = 512  # tokens; rows that decode are padded to the longest of their span, at most twice their own length or this much more


@dataclass(frozen=True, slots=True)
class Span:
    """Rows next to each other on the line with the same number of tokens.

    Attributes:
        begin, count: first token on the line, tokens of each row.
        lengths: int64 [rows]; tokens a row has in the cache after this step.
        blocks: int64 [rows, blocks]; padded with scratch block 0.
    """

    begin: int
    count: int
    lengths: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Inputs:
    """
    Attributes:
        ids, positions: int64 [1, tokens].
        slots: int64 [tokens]; where a token's K and V go: block * block_size + offset.
        sampled: int64 [wanted]; tokens on the line whose logits are wanted: to sample from them, or to tell of the prompt.
        lengths: int64 [tokens]; of a token's sequence when its K is first computed: the prompt's, or up to the token where it is generated.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: npt.NDArray[np.int64]
    sampled: torch.Tensor
    lengths: torch.Tensor
    spans: list[Span]


def build(parts: Sequence[Part], block_size: int, device: torch.device, previous: torch.Tensor | None = None) -> Inputs:
    """Tensors of arranged parts. `previous`: int64, what the step before sampled, where it is not read yet."""
    ids = np.concatenate([token_ids(part) for part in parts]).astype(np.int64)
    positions = np.concatenate([np.arange(part.begin, part.kv_len) for part in parts])
    blocks = np.concatenate([part.row.blocks[part.begin // block_size : -(-part.kv_len // block_size)].repeat(block_size)
                             [part.begin % block_size :][: part.count] for part in parts])  # fmt: skip
    prompt_lengths = np.repeat([len(part.row.ids) - part.row.base for part in parts], [part.count for part in parts])
    return Inputs(
        ids=resolved(upload(ids, device), previous)[None],
        positions=upload(positions[None], device),
        slots=blocks.astype(np.int64) * block_size + positions % block_size,
        sampled=upload(wanted(parts), device),
        lengths=upload(np.maximum(positions + 1, prompt_lengths), device),
        spans=spans(parts, block_size),
    )


def wanted(parts: Sequence[Part]) -> npt.NDArray[np.int64]:
    """Of each part its last tokens."""
    ends = np.cumsum([part.count for part in parts])
    if not any(part.scores for part in parts):
        return np.asarray(ends[[part.samples for part in parts]] - 1)
    return np.concatenate([np.arange(end - part.wanted, end) for end, part in zip(ends, parts, strict=True)])


def token_ids(part: Part) -> Int32:
    return np.array(last_ids([part]), np.int32) if part.decodes else part.row.ids[part.begin : part.kv_len]


def last_ids(parts: Sequence[Part]) -> list[int]:
    """Of rows that decode. A token that the host does not know yet is -1 less its place among the samples of the step before."""
    return [part.row.last_id if part.source is None else -1 - part.source for part in parts]


def resolved(ids: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """int64 [tokens], with what the step before sampled where the host does not know it."""
    return ids if previous is None or not len(previous) else torch.where(ids < 0, previous[(-1 - ids).clamp_(min=0)], ids)


def spans(parts: Sequence[Part], block_size: int) -> list[Span]:
    result: list[Span] = []
    group: list[Part] = []
    begin = 0
    for part in parts:
        if group and not together(group[0], part):
            result.append(span(group, begin, block_size))
            begin, group = begin + sum(member.count for member in group), []
        group.append(part)
    return [*result, span(group, begin, block_size)]


def together(longest: Part, part: Part) -> bool:
    return longest.decodes and part.decodes and longest.kv_len <= max(2 * part.kv_len, part.kv_len + SPREAD)


def span(parts: Sequence[Part], begin: int, block_size: int) -> Span:
    lengths = np.array([part.kv_len for part in parts])
    blocks = np.zeros((len(parts), -(-int(lengths.max()) // block_size)), np.int64)
    for line, part in zip(blocks, parts, strict=True):
        held = -(-part.kv_len // block_size)
        line[:held] = part.row.blocks[:held]
    return Span(begin, parts[0].count, lengths, blocks)
