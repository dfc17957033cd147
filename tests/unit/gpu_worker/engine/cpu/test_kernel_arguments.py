"""How the work of attention is cut into tiles and parts of their keys."""

import numpy as np

from gpu_worker.engine.cpu.kernel_arguments import SEGMENT, split_tiles


def cut(*tiles: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Tiles as (first token, tokens, position) → (first token, part, parts), for two threads."""
    split = split_tiles(np.array([(*tile, 0, 0) for tile in tiles]), threads=2)
    return [(int(tile[0]), int(tile[5]), int(tile[6])) for tile in split]


def test_a_long_row_beside_short_ones_is_split_by_its_keys() -> None:
    assert cut((0, 1, 99), (1, 1, 2 * SEGMENT), (2, 1, 99)) == [
        (1, 0, 3),
        (1, 1, 3),
        (1, 2, 3),
        (0, 0, 1),
        (2, 0, 1),
    ]


def test_rows_that_occupy_all_threads_stay_whole() -> None:
    assert cut(*((row, 1, 4 * SEGMENT) for row in range(8))) == [(row, 0, 1) for row in range(8)]


def test_the_tile_with_the_most_work_comes_first() -> None:
    assert cut((0, 32, 0), (32, 32, 32), (64, 5, 64)) == [(32, 0, 1), (0, 0, 1), (64, 0, 1)]
