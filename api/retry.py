"""Retry: repeat a step until it succeeds; a policy decides after each failure whether to give up or to
wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from api.errors import ApiError
from common.broker.client import ERRORS, describe_error
from common.broker.failures import FailureLog

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Policy = Callable[[Exception], Awaitable[None]]
"""Called after a failure: raises to give up, or returns when it is time for the next attempt."""

PAUSE_S = 0.2


async def attempt(step: Callable[[], Awaitable[Result]], policy: Policy) -> Result:
    """The result of `step`, or what the policy raises. Failures are ApiError and the broker's errors."""
    while True:
        try:
            return await step()
        except (ApiError, *ERRORS) as error:
            await policy(error)


async def fail_fast(error: Exception) -> None:
    """Policy of a client that waits for an answer: the first failure is the result."""
    raise error


async def retry_forever(error: Exception) -> None:
    """Policy of a step that must be done, however long the broker is away."""
    log.debug("retrying after: %s", describe_error(error))
    await asyncio.sleep(PAUSE_S)


async def repeat_forever(step: Callable[[], Awaitable[None]], name: str) -> None:
    """Run `step` again and again, whatever the broker does; its failures are logged as those of `name`."""
    failures = FailureLog(log, name)
    while True:
        with failures.caught():
            await step()
            continue
        await asyncio.sleep(PAUSE_S)
