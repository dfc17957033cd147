"""What a gateway knows of other pools while the directory changes."""

from api.requests.directory import merge
from common.broker.directory import TTL_S, KnownPool, PoolEntry

OLD, NEW = PoolEntry("redis://a", num_ready=1), PoolEntry("redis://a", num_ready=2)


def test_what_is_found_replaces_what_was_known() -> None:
    found = {"a": KnownPool(NEW, 0.1)}
    assert merge({"a": KnownPool(OLD, 0.2)}, found, 0.5) == found


def test_a_pool_that_a_new_directory_lacks_is_known_until_it_is_silent_for_too_long() -> None:
    known = merge({"a": KnownPool(OLD, 0.2)}, {}, 0.5)
    assert known == {"a": KnownPool(OLD, 0.7)} and known["a"].is_live
    assert not merge(known, {}, 10)["a"].is_live
    assert merge(known, {}, TTL_S) == {}
