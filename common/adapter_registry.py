"""Adapter registry: the LoRA adapters of a pool, in one hash in Redis that all its processes watch.

Its fields are keys of adapters with their records, `version`, which changes with each change, and `seeded`,
the keys that LORA_ADAPTERS has added: an adapter that was unloaded since does not come back with a gateway.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from common.adapters import LEAVING, LOADING, READY, PoolAdapter
from common.broker.keys import ADAPTERS_TTL_MS, Keys
from common.broker.lua import Args, ScriptCall, call_script
from common.broker.pool_client import VERSION, ChangeRefused, PoolClient
from common.messages.codec import decode_fields, encode

SEEDED = "seeded"
MAX_ADAPTERS = 256
MAX_TRIES = 32


@dataclass(frozen=True)
class AdapterRegistry:
    """The registry as it was read, or as it is to be.

    Attributes:
        adapters: by key.
        seeded: keys that settings have added.
        version: empty where there is no registry.
    """

    adapters: Mapping[str, PoolAdapter] = field(default_factory=dict)
    seeded: frozenset[str] = frozenset()
    version: bytes = b""

    def named(self, name: str) -> PoolAdapter | None:
        """Return the adapter of this name that requests get."""
        return next((one for one in self.ready if one.name == name), None)

    @property
    def ready(self) -> list[PoolAdapter]:
        """The adapters that requests may name, the oldest first."""
        found = [one for one in self.adapters.values() if one.state == READY]
        return sorted(found, key=lambda one: (one.added_ms, one.name))

    def with_loading(self, adapter: PoolAdapter, in_place: bool) -> "AdapterRegistry":
        """Return the registry with one that workers are to load, ready if it was. Raises ChangeRefused.

        Args:
            in_place: it may take the place of another one of its name.
        """
        for one in self.adapters.values():
            if one.name == adapter.name and one.state == LOADING:
                raise ChangeRefused(f"the adapter {adapter.name!r} is being loaded")
        known = self.named(adapter.name)
        if not in_place and known and not known.failure:
            raise ChangeRefused(f"the adapter {adapter.name!r} is loaded already: `load_inplace` replaces it")
        is_again = known is not None and known.key == adapter.key
        return self.put(replace(adapter, state=READY if is_again else LOADING))

    def with_ready(self, key: str) -> "AdapterRegistry":
        """Return the registry in which requests get this adapter, and no other one of its name."""
        if (adapter := self.adapters.get(key)) is None or adapter.state == LEAVING:
            raise ChangeRefused("the adapter was unloaded while workers loaded it", True)
        return self.without(lambda one: one.name == adapter.name).put(replace(adapter, state=READY))

    def without(self, is_unwanted: Callable[[PoolAdapter], bool]) -> "AdapterRegistry":
        """Return the registry in which requests do not get these adapters."""
        gone = {key: replace(one, state=LEAVING) for key, one in self.adapters.items() if is_unwanted(one)}
        return replace(self, adapters={**self.adapters, **gone})

    def with_failure(self, adapter: PoolAdapter, failure: str) -> "AdapterRegistry":
        """Return the registry that knows of one more engine that this adapter ended, unless that was written
        anew. No further worker loads it from the second one on: the first may have been killed by chance.
        """
        known = self.adapters.get(adapter.key)
        if known is None or known.added_ms != adapter.added_ms:
            return self
        known = replace(known, num_ends=known.num_ends + 1, failure=failure if known.num_ends else "")
        return replace(self, adapters={**self.adapters, adapter.key: known})

    def seeded_with(self, adapters: Iterable[PoolAdapter]) -> "AdapterRegistry":
        """Return the registry with the adapters of settings, those that it has had from them before left out.
        Raises ChangeRefused.
        """
        wanted = {one.key: one for one in adapters}
        found = self
        for key, one in wanted.items():
            if key not in self.seeded:
                found = found.put(one).with_ready(key)
        return replace(found, seeded=frozenset(wanted))

    def restored(self, found: "AdapterRegistry") -> "AdapterRegistry":
        """Return this registry for a broker that has lost it; the one that was found if it has one."""
        return found if found.version else replace(self, version=b"")

    def put(self, adapter: PoolAdapter) -> "AdapterRegistry":
        """Return the registry with this adapter. Raises ChangeRefused."""
        if adapter.key not in self.adapters and len(self.adapters) >= MAX_ADAPTERS:
            raise ChangeRefused(f"there are {MAX_ADAPTERS} adapters, which is the most: unload one")
        return replace(self, adapters={**self.adapters, adapter.key: adapter})

    @property
    def fields(self) -> dict[str, bytes]:
        """The fields of the hash but its version."""
        records = {key: encode(one) for key, one in self.adapters.items()}
        return records | ({SEEDED: "\n".join(sorted(self.seeded)).encode()} if self.seeded else {})


# --- in Redis -----------------------------------------------------------------------------------------------


async def read_registry(client: PoolClient) -> AdapterRegistry:
    """Return the registry. A record that cannot be read is no adapter."""
    fields = await client.redis.hgetall(client.keys.adapters)  # type: ignore[misc]
    seeded = fields.get(SEEDED.encode(), b"").decode().split("\n")
    version = fields.get(VERSION.encode(), b"")
    return AdapterRegistry(decode_fields(PoolAdapter, fields), frozenset(filter(None, seeded)), version)


async def read_newer(client: PoolClient, known: AdapterRegistry) -> AdapterRegistry:
    """Return the registry, which is read only if it is not the one that is known."""
    version = await client.read_version(client.keys.adapters)
    return known if version == known.version else await read_registry(client)


async def change_registry(
    client: PoolClient, edit: Callable[[AdapterRegistry], AdapterRegistry]
) -> AdapterRegistry:
    """Change the registry as `edit` says, which is called again if somebody else has changed it meanwhile.
    Return it as it is then. Raises what `edit` raises.
    """
    for _ in range(MAX_TRIES):
        before = await read_registry(client)
        after = edit(before)
        if after == before or await client.run(change_adapters(client.keys, before, after)):
            return after
    raise ChangeRefused("others change the adapters all the time: try again")


def change_adapters(keys: Keys, before: AdapterRegistry, after: AdapterRegistry) -> ScriptCall[bool]:
    """Write what differs. The reply is False if the registry is not as it was before."""
    old, new = before.fields, after.fields
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    removed = [name for name in old if name not in new]
    args: Args = {"version": before.version, "ttl_ms": ADAPTERS_TTL_MS, "num_removed": len(removed)}
    pairs = [part for pair in changed.items() for part in pair]
    return call_script("change_adapters", bool, keys, args=args, more_args=[*removed, *pairs])
