"""Token counts: they equal a Counter of the same tokens."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.batch.sampling_state import SPARE_COLUMNS, TokenCounts

token_ids = st.lists(st.integers(0, 9) | st.integers(0, 1000), max_size=200)


def check(counts: TokenCounts, prompt: list[int], generated: list[int]) -> None:
    ids = counts.ids.tolist()
    in_all = Counter(prompt + generated)
    in_generated = Counter(generated)
    assert sorted(ids) == sorted(in_all)
    assert counts.counts.tolist() == [in_all[token] for token in ids]
    assert counts.generated.tolist() == [in_generated[token] for token in ids]
    assert counts.num_tokens == len(prompt) + len(generated)


@given(token_ids, token_ids, token_ids)
def test_counts_equal_a_counter_after_every_start_and_append(
    prompt: list[int], generated: list[int], appended: list[int]
) -> None:
    counts = TokenCounts(np.array(prompt, np.int32), generated)
    check(counts, prompt, generated)
    for token in appended:
        counts.accept(token)
    check(counts, prompt, generated + appended)


def test_the_table_grows_beyond_its_spare_columns() -> None:
    generated = list(range(10, 10 + 3 * SPARE_COLUMNS))
    counts = TokenCounts(np.array([1, 1, 12], np.int32), [])
    for token in generated:
        counts.accept(token)
    check(counts, [1, 1, 12], generated)
