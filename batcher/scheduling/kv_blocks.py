"""KV blocks of workers: which are free, and which hold what, by name (common/messages/request.py).

The batcher has numbers of blocks only; the engine has their memory.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from batcher.scheduling.sequence import PlacedRow


class PrefixIndex:
    """Which caches know a name: a block of that name is computed there, or is being computed.

    Attributes:
        first: name → one of the caches that know it; most names have no other.
        others: name → the other caches, in the order in which they came.
    """

    def __init__(self) -> None:
        self.first: dict[bytes, PrefixCache] = {}
        self.others: dict[bytes, dict[PrefixCache, None]] = {}

    def add(self, name: bytes, cache: "PrefixCache") -> None:
        if self.first.setdefault(name, cache) is not cache:
            self.others.setdefault(name, {})[cache] = None

    def remove(self, name: bytes, cache: "PrefixCache") -> None:
        others = self.others.get(name, {})
        if self.first.get(name) is not cache:
            others.pop(cache, None)
        elif others:
            self.first[name] = next(iter(others))
            del others[self.first[name]]
        else:
            del self.first[name]
        if name in self.others and not others:
            del self.others[name]

    def holders(self, name: bytes) -> Iterator["PrefixCache"]:
        if name in self.first:
            yield self.first[name]
            yield from self.others.get(name, ())


@dataclass(eq=False)
class PrefixCache:
    """The blocks of a worker whose tokens are all computed, by name.

    A block's name says what it and all blocks before it hold, so a prefix is found block by block. A row's
    blocks become idle from the last to the first, and a use of a block is a use of those before it. So no
    other block follows the one that has been idle for the longest.

    Attributes:
        blocks: name → block.
        names: block → name.
        idle: blocks that no row has, the least recently used first.
        expected: name of a block that is not here yet → the row that computes it.
        index: which caches know a name.
        snapshots: blocks at whose ends the worker has kept the states of its model, so that rows can go on
            from there; None if its model has no states, and rows can go on from each block.
    """

    blocks: dict[bytes, int] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    expected: dict[bytes, PlacedRow] = field(default_factory=dict)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    snapshots: set[int] | None = None

    def join_index(self, index: PrefixIndex) -> None:
        """Become one of the caches in which requests are looked up."""
        self.index = index
        for name in (*self.blocks, *self.expected):
            index.add(name, self)

    def leave_index(self) -> None:
        for name in (*self.blocks, *self.expected):
            self.index.remove(name, self)
        self.index = PrefixIndex()

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest prefix that is here, and from which a row can go on."""
        found = []
        for name in names:
            if (block := self.blocks.get(name)) is None:
                break
            found.append(block)
        while self.snapshots is not None and found and found[-1] not in self.snapshots:
            found.pop()
        return found

    def find_expected(self, names: list[bytes]) -> tuple[int, int, PlacedRow | None]:
        """Return how many blocks of a prefix are here, how many with those that rows compute, and the row
        that computes the last of these.
        """
        num_here = end = len(self.find(names))
        row = None
        if self.snapshots is not None:
            ends = (end for end in range(len(names), num_here, -1) if names[end - 1] in self.expected)
            end = next(ends, num_here)
            return num_here, end, self.expected[names[end - 1]] if end > num_here else None
        while end < len(names) and (computes := self.expected.get(names[end])) is not None:
            row = computes
            end += 1
        return num_here, end, row

    def expect(self, names: Iterable[bytes], row: PlacedRow) -> None:
        """Note that a row computes the blocks with these names. The states of a model are kept at the end of
        the last one.
        """
        if self.snapshots is not None:
            names = list(names)[-1:]
        for name in names:
            if name not in self.blocks and name not in self.expected:
                self.expected[name] = row
                self.index.add(name, self)

    def expect_no_more(self, names: Iterable[bytes], row: PlacedRow) -> None:
        """Note that a row has computed these blocks, or will not."""
        for name in names:
            if self.expected.get(name) is row:
                del self.expected[name]
                if name not in self.blocks:
                    self.index.remove(name, self)

    def add(self, name: bytes, block: int) -> None:
        """Name a block that a row has, unless it has a name or another block has this one."""
        if name not in self.blocks and block not in self.names:
            self.blocks[name] = block
            self.names[block] = name
            if name not in self.expected:  # else the index, which is large, has it
                self.index.add(name, self)

    def note_snapshots(self, changes: Iterable[int]) -> None:
        """Note blocks at whose ends states are kept, and negative those where they are no more."""
        if self.snapshots is None:
            return
        for block in changes:
            if block > 0:
                self.snapshots.add(block)
            else:
                self.snapshots.discard(-block)

    def touch(self, name: bytes) -> None:
        """Mark the block of this name, if there is one, as used."""
        block = self.blocks.get(name, 0)
        if block in self.idle:
            self.idle.move_to_end(block)

    def evict(self) -> int:
        """Forget the least recently used block that no row has. Return it."""
        block, _ = self.idle.popitem(last=False)
        name = self.names.pop(block)
        del self.blocks[name]
        if name not in self.expected:
            self.index.remove(name, self)
        return block


class BlockPool:
    """Which of a worker's blocks, 1 to `num_blocks`, are free. Block 0 is the engine's scratch.

    Attributes:
        free: blocks that hold nothing.
        cache: what complete blocks hold. Its idle blocks are allocated when no other is free.
        others: block that several rows have → how many rows besides the first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks, 0, -1))
        self.cache = PrefixCache()
        self.others: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that no row has."""
        return len(self.free) + len(self.cache.idle)

    def can_allocate(self, count: int, beside: Sequence[int] = ()) -> bool:
        """Whether `count` blocks can be allocated once the cached blocks `beside` are shared."""
        idle = self.cache.idle
        num_shared = sum(block in idle for block in beside) if beside else 0
        return count <= len(self.free) + len(idle) - num_shared

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks: free ones, the most recently released first, then the least recently used
        of the cache. The caller checks `can_allocate`.
        """
        if count == 0:
            return []
        blocks = self.free[-count:][::-1]
        del self.free[-count:]
        while len(blocks) < count:
            blocks.append(self.cache.evict())
        if self.cache.snapshots:
            self.cache.snapshots.difference_update(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Give cached blocks to one more row."""
        for block in blocks:
            if block in self.cache.idle:
                del self.cache.idle[block]
            else:
                self.others[block] = self.others.get(block, 0) + 1

    def reserve(self, rows: Counter[int]) -> None:
        """Take blocks that are in use, each by a number of rows.

        Raises ValueError, and takes none, if one is not free.
        """
        free = set(self.free)
        if not rows.keys() <= free:
            raise ValueError("blocks are in use twice, or there are none with such numbers")
        self.free = [block for block in self.free if block not in rows]
        self.others |= {block: count - 1 for block, count in rows.items() if count > 1}

    def release(self, blocks: Sequence[int], names: Sequence[bytes] = ()) -> None:
        """Take these blocks back from a row. `names` are those of the first of them."""
        cache = self.cache
        if not (names or cache.names or self.others):
            self.free.extend(reversed(blocks))
            return
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            if others := self.others.pop(block, 0):
                if others > 1:
                    self.others[block] = others - 1
            elif block in cache.names:
                cache.idle[block] = None
            else:
                self.free.append(block)
            if i < len(names):
                cache.touch(names[i])
