"""Pool choice: which pools a request tries, in which order. Pure functions."""

import enum
import hashlib
import math
import random
from collections.abc import Mapping

NUM_PICKS = 2


class Grade(enum.IntEnum):
    """How far a gateway can use a pool, the best first.

    Attributes:
        CLOSED: it is live by the directory, but not open yet.
        AWAY: no worker, no batcher or no broker.
    """

    OPEN = 0
    CLOSED = 1
    AWAY = 2


def pick_by_depth(depths: Mapping[str, float], chance: random.Random) -> list[str]:
    """Two pools picked at random, the one with the shorter queue first; all have the same chance.

    Every gateway knows the depths as they were some time ago. If each took the shortest queue of all, they
    would fill one pool together until they learn of it.

    Args:
        depths: pool → live requests for each row that it can run.
    """
    picks = chance.sample(sorted(depths), min(NUM_PICKS, len(depths)))
    return sorted(picks, key=depths.__getitem__)


def rank_by_weight(weights: Mapping[str, float], key: str) -> list[str]:
    """All pools with a weight, in the order in which the request `key` tries them.

    The first is each pool with the probability that its weight gives, and the same one at every gateway. If a
    weight grows, requests move to that pool only; if a pool is left out, only its own requests move
    (weighted rendezvous hashing).
    """
    shares = {name: weight for name, weight in weights.items() if weight > 0}
    return sorted(shares, key=lambda name: -math.log(uniform(key, name)) / shares[name])


def uniform(key: str, name: str) -> float:
    """A number above 0 and up to 1 that depends on both texts alone."""
    digest = hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) + 1) / 2**64
