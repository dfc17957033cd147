"""PrefixCache: which KV blocks of a worker hold what, by name (common/block_hashes.py). PrefixIndex: which
workers know a name.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from batcher.scheduling.sequence import PlacedRow


class PrefixIndex:
    """The caches that know each name: a block with it is computed there, or is being computed.

    Attributes:
        first: by name one of them; most names have no other.
        others: by name the rest, in the order in which they came.
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


class PrefixCache:
    """Blocks whose tokens are all computed, by name.

    A block's name says what it and all blocks before it hold, so a prefix is found block by block. The blocks
    of a row become idle from its last to its first, and every use of a block is a use of those before it: so
    the one that has been idle for the longest has no other behind it.

    Attributes:
        blocks: block by name.
        names: name by block.
        idle: blocks that no row has, the least recently used first.
        expected: by name, the row that computes a block which is not here yet.
        index: who else knows a name.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.expected: dict[bytes, PlacedRow] = {}
        self.index = PrefixIndex()

    def join_index(self, index: PrefixIndex) -> None:
        """Be one of the caches in which a request is looked up."""
        self.index = index
        for name in (*self.blocks, *self.expected):
            index.add(name, self)

    def leave_index(self) -> None:
        for name in (*self.blocks, *self.expected):
            self.index.remove(name, self)
        self.index = PrefixIndex()

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest prefix that is here."""
        found = []
        for name in names:
            if (block := self.blocks.get(name)) is None:
                break
            found.append(block)
        return found

    def find_expected(self, names: list[bytes]) -> tuple[int, int, PlacedRow | None]:
        """Return how many blocks of a prefix are here, how many with those that rows compute, and the row
        that computes the last of these.
        """
        num_here = end = len(self.find(names))
        row = None
        while end < len(names) and (computes := self.expected.get(names[end])) is not None:
            row = computes
            end += 1
        return num_here, end, row

    def expect(self, names: Iterable[bytes], row: PlacedRow) -> None:
        """A row computes the blocks with these names."""
        for name in names:
            if name not in self.blocks and name not in self.expected:
                self.expected[name] = row
                self.index.add(name, self)

    def expect_no_more(self, names: Iterable[bytes], row: PlacedRow) -> None:
        """A row has computed its prompt, or will not."""
        for name in names:
            if self.expected.get(name) is row:
                del self.expected[name]
                if name not in self.blocks:
                    self.index.remove(name, self)

    def add(self, name: bytes, block: int) -> None:
        """Name a block that a row has, unless another one has the name, or it has one."""
        if name not in self.blocks and block not in self.names:
            self.blocks[name] = block
            self.names[block] = name
            self.index.add(name, self)

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
