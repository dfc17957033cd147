"""Limits: what the fleet's settings, and its workers, say of each request."""

from dataclasses import dataclass

from common.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each request. `max_total_tokens` counts prompt and new tokens together."""

    max_input_tokens: int
    max_total_tokens: int
    settings: Settings

    @property
    def max_client_batch_size(self) -> int:
        """Prompts of one request."""
        return self.settings.max_client_batch_size or self.settings.max_concurrent_requests
