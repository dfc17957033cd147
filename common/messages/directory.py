"""Directory messages: what the directory says of each pool, and which pools get the requests of a model."""

from dataclasses import dataclass

from common.messages.codec import wire_field


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A pool, as its active batcher describes it at an interval.

    Attributes:
        address: URL of its broker, without user, password and options.
        models: names by which clients may ask for its model.
        model_id, tokenizer_name: where its workers have model and tokenizer from; gateways load the latter.
        num_ready, num_loading: workers that are ready; those that load, counted while none is ready.
        num_sleepers: workers that serve the pool in its turn, counted while none is ready.
        waiting, rows: live requests that wait, and that run.
        capacity: rows that its workers run together.
        adapters: names of its LoRA adapters, by which clients may ask for them.
    """

    address: str = wire_field("a")
    models: list[str] = wire_field("m", default_factory=list)
    model_id: str = wire_field("mi", default="")
    tokenizer_name: str = wire_field("tn", default="")
    num_ready: int = wire_field("r", default=0)
    num_loading: int = wire_field("l", default=0)
    waiting: int = wire_field("w", default=0)
    rows: int = wire_field("rw", default=0)
    capacity: int = wire_field("c", default=0)
    num_sleepers: int = wire_field("s", default=0)
    adapters: list[str] = wire_field("ad", default_factory=list)

    @property
    def depth(self) -> float:
        """Live requests for each row that its workers can run: above 1, some wait."""
        return (self.waiting + self.rows) / max(1, self.capacity)


@dataclass(frozen=True, slots=True)
class ModelShares:
    """Which pools get the requests of a model.

    Attributes:
        weights: pool and weight. A pool gets its weight's share of their sum, one of weight 0 gets none.
    """

    weights: list[tuple[str, float]] = wire_field("w")
