"""Plural: a count with its noun."""


def plural(count: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`."""
    return f"{count} {noun}{'s' * (count != 1)}"
