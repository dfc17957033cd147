"""What a step computes of an encoder-decoder model: which prompts are encoded, and which tokens are decoded.
No tensors of the model.

A row's positions are those of its prompt, the last ones of which start the decoder, then of what it has
generated. Its blocks hold in the places of the encoded tokens the K and V by which the decoder sees them, in
the others its own. So an encoder-decoder row needs as many blocks as any other of its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.step_result import Int32

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt that the step encodes.

    Attributes:
        ids: int32 [tokens] of the encoder.
        slots: int64 [tokens]; where the decoder's K and V of each are written: block * block_size + offset.
    """

    ids: Int32
    slots: Int64


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """The tokens of a step that the decoder computes; all int64.

    Attributes:
        places: [tokens]; places among all tokens of the step.
        positions: [tokens] in their rows.
        num_encoded: [tokens]; encoded tokens of their rows.
        slots: [tokens]; where their K and V are written.
        encoded_blocks: [tokens, blocks] of their rows' encoded tokens, padded with the scratch block 0.
        own_blocks: [tokens, blocks] of the decoder's tokens of their rows, likewise; encoded ones may lie
            before them in the first block.
    """

    places: Int64
    positions: Int64
    num_encoded: Int64
    slots: Int64
    encoded_blocks: Int64
    own_blocks: Int64


def num_encoded(row_slice: RowSlice, num_starting: int) -> int:
    """Tokens of a row that the encoder gets; the last `num_starting` of its prompt start the decoder."""
    row = row_slice.row
    return max(0, len(row.ids) - row.base - num_starting)


def encoded_prompts(slices: Sequence[RowSlice], num_starting: int, block_size: int) -> list[EncodedPrompt]:
    """The prompts whose first token for the decoder is in the step. Earlier chunks of them compute nothing:
    each encoded token depends on all others.
    """
    found = []
    for row_slice in slices:
        encoded = num_encoded(row_slice, num_starting)
        if 0 < encoded < row_slice.kv_len and row_slice.begin <= encoded:
            row = row_slice.row
            found.append(
                EncodedPrompt(row.ids[:encoded], slots_of(row.blocks, np.arange(encoded), block_size))
            )
    return found


def decoded_tokens(slices: Sequence[RowSlice], num_starting: int, block_size: int) -> DecodedTokens:
    """The tokens of arranged slices that are not only encoded."""
    begins = np.cumsum([0, *(row_slice.count for row_slice in slices)])
    parts = []
    for begin, row_slice in zip(begins.tolist(), slices, strict=False):
        encoded = num_encoded(row_slice, num_starting)
        positions = np.arange(max(row_slice.begin, encoded), row_slice.kv_len)
        if len(positions):
            places = positions - row_slice.begin + begin
            parts.append((row_slice.row.blocks, encoded, positions, places))
    counts = [len(positions) for _, _, positions, _ in parts]
    slots = [slots_of(blocks, positions, block_size) for blocks, _, positions, _ in parts]
    held = [-(-int(positions[-1] + 1) // block_size) for _, _, positions, _ in parts]
    encoded_blocks = [blocks[: -(-encoded // block_size)] for blocks, encoded, _, _ in parts]
    own_blocks = [
        blocks[encoded // block_size : end] for (blocks, encoded, _, _), end in zip(parts, held, strict=True)
    ]
    return DecodedTokens(
        places=joined([places for *_, places in parts]),
        positions=joined([positions for _, _, positions, _ in parts]),
        num_encoded=np.repeat(np.array([encoded for _, encoded, _, _ in parts], np.int64), counts),
        slots=joined(slots),
        encoded_blocks=padded(encoded_blocks).repeat(counts, axis=0),
        own_blocks=padded(own_blocks).repeat(counts, axis=0),
    )


def padded(lists: Sequence[Int32]) -> Int64:
    """Lists of blocks → int64 [lists, at least one], each filled up with block 0."""
    table = np.zeros((len(lists), max(1, *map(len, lists), 1)), np.int64)
    for line, blocks in zip(table, lists, strict=True):
        line[: len(blocks)] = blocks
    return table


def slots_of(blocks: Int32, positions: Int64, block_size: int) -> Int64:
    """Lines of the cache of a row's positions, int64 [positions]."""
    return blocks.astype(np.int64)[positions // block_size] * block_size + positions % block_size


def joined(parts: Sequence[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
