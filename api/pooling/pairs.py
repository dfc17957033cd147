"""Pairs: the requests for scores of pairs of texts. An embedding model computes each text once, and scores
are cosines; a reranker computes each pair.
"""

from collections.abc import Sequence

from api.pooling.inputs import (
    InputOptions,
    PooledInputs,
    PoolingInput,
    any_pooling,
    check_number,
    read_inputs,
)
from api.requests.pool import Pool
from common.messages.request import EMBED


async def read_pairs(
    pool: Pool,
    route: str,
    queries: Sequence[str],
    others: Sequence[str],
    names: tuple[str, str],
    options: InputOptions,
) -> tuple[PooledInputs, int]:
    """The requests for scores of pairs, and `num_queries` of their answer. An embedding model computes both
    sides once, and their cosines are the scores; a reranker computes each pair. Raises ApiError.

    Args:
        queries: one for all `others`, or as many as they are.
        names: of the fields of both.
    """
    pooling = any_pooling(pool, route)
    check_number(others, pool.workers.limits, names[1])
    if pooling.kind == EMBED:
        sides = [*inputs_of(queries, names[0]), *inputs_of(others, names[1])]
        return await read_inputs(pool, sides, options, names[1]), len(queries)
    firsts = [*queries] * len(others) if len(queries) == 1 else queries
    pairs = [
        PoolingInput(f"{names[1]}[{i}]", text=first, pair=second)
        for i, (first, second) in enumerate(zip(firsts, others, strict=True))
    ]
    return await read_inputs(pool, pairs, options, names[1]), 0


def inputs_of(texts: Sequence[str], name: str) -> list[PoolingInput]:
    return [PoolingInput(f"{name}[{i}]", text=text) for i, text in enumerate(texts)]
