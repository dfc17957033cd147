"""`tokenfleet bench`: this fleet beside any other server."""

from deploy.bench.command import main

__all__ = ["main"]
