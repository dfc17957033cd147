"""Adapter messages: the LoRA adapters of a pool, those that a worker holds, and the requests with some."""

from dataclasses import dataclass

from common.messages.codec import wire_field

SHOWN_DIGITS = 16
"""Digits of an adapter's digest in its key."""
LOADING, READY, LEAVING = "loading", "ready", "leaving"
"""States of an adapter: workers load it, requests may name it, or it goes once no live request has it."""


@dataclass(frozen=True, slots=True)
class PoolAdapter:
    """A LoRA adapter of a pool.

    Attributes:
        name: by which clients ask for it.
        path: its folder, or its hub id, perhaps with `@revision`; each worker finds it there.
        digest: SHA-256 of its files, in hexadecimal digits: a worker that finds other files refuses it.
        state: LOADING, READY or LEAVING.
        rank: the largest of its matrices, by its configuration.
        base_model: that it was made for, by its configuration.
        added_ms: Unix time in ms; a record that is written anew has another one.
        failure: how an engine ended that loaded it; workers that do not have it yet refuse it.
    """

    name: str = wire_field("n")
    path: str = wire_field("p")
    digest: str = wire_field("d")
    state: str = wire_field("s", default=LOADING)
    rank: int = wire_field("r", default=0)
    base_model: str = wire_field("b", default="")
    added_ms: int = wire_field("a", default=0)
    failure: str = wire_field("f", default="")

    @property
    def key(self) -> str:
        """What requests, block hashes and engines know it by; another one of its name has another key."""
        return f"{self.name}@{self.digest[:SHOWN_DIGITS]}"


def adapter_name(key: str) -> str:
    """Return the name of the adapter with this key; empty for none."""
    return key.rpartition("@")[0]


@dataclass(frozen=True, slots=True)
class HeldAdapters:
    """The adapters that a worker has loaded, in the field `adapters` of its heartbeat.

    Attributes:
        loaded: keys of adapters with which rows may start.
        refused: (key, `added_ms` of the record, cause) of those that it cannot serve.
    """

    loaded: list[str] = wire_field("l", default_factory=list)
    refused: list[tuple[str, int, str]] = wire_field("r", default_factory=list)

    def why_not(self, adapter: PoolAdapter) -> str:
        """Return why the worker cannot serve this adapter; empty if it can, or may yet."""
        wanted = (adapter.key, adapter.added_ms)
        return next((cause for key, added_ms, cause in self.refused if (key, added_ms) == wanted), "")


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The live requests with adapters, in the field `adapters` of the hash `state`.

    Attributes:
        requests: (name of an adapter, number of those that run, number of those that wait).
    """

    requests: list[tuple[str, int, int]] = wire_field("r", default_factory=list)
