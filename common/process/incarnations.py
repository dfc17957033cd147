"""Incarnations: names of one life of a process; each has its own streams in Redis."""

import secrets


def new_incarnation(name: str) -> str:
    """Return a name that no other process has: 64 random bits."""
    return f"{name}-{secrets.token_hex(8)}"


def next_incarnation(incarnation: str) -> str:
    """Return the name of the next life of the same process: `w0-1f.2` comes after `w0-1f`."""
    first, _, number = incarnation.partition(".")
    return f"{first}.{int(number or 1) + 1}"


def first_incarnation(incarnation: str) -> str:
    """Return the name that its launcher gave the process of an incarnation."""
    return incarnation.partition(".")[0]
