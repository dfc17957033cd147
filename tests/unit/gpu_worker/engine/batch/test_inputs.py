"""Inputs of a step: ids, positions, slots and spans of decoding rows and chunks of prompts."""

import torch

from gpu_worker.engine.batch.inputs import MAX_PADDING, Inputs, build_inputs
from gpu_worker.engine.batch.row import Row, RowSlice
from gpu_worker.engine.cpu.kernel_arguments import tiles_of
from tests.support.engine.row_steps import BLOCK, EOS, TEXT, start

CPU = torch.device("cpu")


def decoding(number: int, kv_len: int, source_place: int | None = None) -> RowSlice:
    """The decode of a row with a prompt of three tokens, after which it has `kv_len` tokens."""
    row = Row.of(start(number, 3, num_blocks=-(-kv_len // BLOCK)), [EOS])
    row.last_id = TEXT
    return RowSlice(row, kv_len - 1, 1, True, source_place)


def chunk(number: int, num_ids: int, begin: int, num_scored: int = 0, base: int = 0) -> RowSlice:
    """The last chunk of a prompt, whose ids are its positions."""
    row = Row.of(start(number, num_ids, base=base), [EOS])
    return RowSlice(row, begin, num_ids - begin, True, num_scored=num_scored)


def build(*slices: RowSlice, previous: torch.Tensor | None = None) -> Inputs:
    return build_inputs(slices, BLOCK, CPU, previous)


def test_a_mixed_step_has_one_flat_sequence() -> None:
    inputs = build(decoding(0, kv_len=6), chunk(1, num_ids=6, begin=2))
    assert inputs.ids.tolist() == [[TEXT, 2, 3, 4, 5]]
    assert inputs.positions.tolist() == [[5, 2, 3, 4, 5]]
    assert inputs.sampled.tolist() == [0, 4]


def test_slots_follow_the_blocks_of_each_row() -> None:
    """Row 0 has the blocks from 1 on, row 1 those from 101 on."""
    inputs = build(decoding(0, kv_len=6), chunk(1, num_ids=6, begin=2))
    assert inputs.slots.tolist() == [
        2 * BLOCK + 1,
        101 * BLOCK + 2,
        101 * BLOCK + 3,
        102 * BLOCK,
        102 * BLOCK + 1,
    ]


def test_a_chunk_is_a_span_and_decoding_rows_share_one() -> None:
    inputs = build(decoding(0, kv_len=6), decoding(2, kv_len=4), chunk(1, num_ids=6, begin=2))
    decode_span, prompt_span = inputs.spans
    assert (decode_span.begin, decode_span.count, decode_span.lengths.tolist()) == (0, 1, [6, 4])
    assert decode_span.blocks.tolist() == [[1, 2], [201, 0]]
    assert (prompt_span.begin, prompt_span.count, prompt_span.lengths.tolist()) == (2, 4, [6])
    assert prompt_span.blocks.tolist() == [[101, 102]]


def test_a_span_pads_no_row_to_far_beyond_its_length() -> None:
    lengths = [2 * MAX_PADDING + 40, MAX_PADDING + 20, 20, 10]
    inputs = build(*[decoding(number, kv_len) for number, kv_len in enumerate(lengths)])
    assert [span.lengths.tolist() for span in inputs.spans] == [lengths[:2], lengths[2:]]


def test_an_id_that_is_not_read_yet_comes_from_the_step_before() -> None:
    previous = torch.tensor([40, 41])
    inputs = build(
        decoding(0, 6), decoding(1, 5, source_place=1), decoding(2, 4, source_place=0), previous=previous
    )
    assert inputs.ids.tolist() == [[TEXT, 41, 40]]


def test_scored_tokens_need_logits_too() -> None:
    inputs = build(decoding(0, kv_len=6), chunk(1, num_ids=6, begin=2, num_scored=3))
    assert inputs.sampled.tolist() == [0, 1, 2, 3, 4]


def test_keys_of_a_prompt_are_computed_at_its_whole_length() -> None:
    """Those of generated tokens of a resumed row, here the last four, at the length up to the token."""
    inputs = build(chunk(0, num_ids=6, begin=0), chunk(1, num_ids=6, begin=0, base=4))
    assert inputs.lengths.tolist() == [6] * 6 + [2, 2, 3, 4, 5, 6]


def test_proposals_are_rows_beside_the_token_before_them() -> None:
    """Each sees what is before it, and is one token longer; its slice is one tile of the native kernels, or
    tokens would be attended to before their K is written.
    """
    speculating, plain = decoding(0, kv_len=11), decoding(1, kv_len=6)
    speculating = RowSlice(speculating.row, 7, 4, True, proposed=[21, 22, 23])
    inputs = build(speculating, plain, chunk(2, num_ids=6, begin=2))
    assert inputs.ids.tolist() == [[TEXT, 21, 22, 23, TEXT, 2, 3, 4, 5]]
    assert inputs.positions.tolist() == [[7, 8, 9, 10, 5, 2, 3, 4, 5]]
    assert inputs.slots.tolist()[:5] == [2 * BLOCK + 3, *range(3 * BLOCK, 3 * BLOCK + 3), 102 * BLOCK + 1]
    assert inputs.sampled.tolist() == [0, 1, 2, 3, 4, 8]
    decoded, prompt = inputs.spans
    assert (decoded.begin, decoded.count, prompt.begin, prompt.count) == (0, 1, 5, 4)
    assert decoded.lengths.tolist() == [8, 9, 10, 11, 6]
    assert decoded.blocks.tolist() == [[1, 2, 0], [1, 2, 3], [1, 2, 3], [1, 2, 3], [101, 102, 0]]
    assert decoded.shares.tolist() == [4, 1]
    assert tiles_of(decoded, 0, 3).tolist() == [[0, 4, 7, 9, 0], [4, 1, 5, 12, 0]]
