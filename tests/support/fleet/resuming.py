"""A client that comes back when its connection is lost, until it has the whole stream."""

import asyncio
from typing import Any

import httpx

from tests.support.sse import frames_of

UNREACHABLE = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)


class ResumingClient:
    """Reads one stream through the gateways at `urls`, in turn.

    Attributes:
        content: the whole frames that have come.
        num_returns: how often it came back.
    """

    def __init__(self, *urls: str, **headers: str) -> None:
        self.urls = urls
        self.headers = headers
        self.content = b""
        self.place = ""
        self.num_returns = 0

    @property
    def num_frames(self) -> int:
        return len(frames_of(self.content))

    async def read(self, path: str, body: dict[str, Any]) -> bytes:
        """The frames of the whole stream."""
        async with httpx.AsyncClient(timeout=90) as http:
            attempt = self.follow(http, "POST", self.urls[0] + path, json=body)
            while not await attempt:
                self.num_returns += 1
                url = self.urls[self.num_returns % len(self.urls)] + self.place
                attempt = self.follow(http, "GET", url)
                await asyncio.sleep(0.05)
        return self.content

    async def follow(self, http: httpx.AsyncClient, method: str, url: str, **options: Any) -> bool:
        """Read one response; returns whether it came to its end."""
        headers = self.headers | ({"last-event-id": str(self.num_frames)} if self.content else {})
        rest = b""
        try:
            async with http.stream(method, url, headers=headers, **options) as response:
                if response.status_code == 503 and self.place:
                    return False
                assert response.status_code in (200, 204), (response.status_code, await response.aread())
                self.place = response.headers.get("content-location", self.place)
                async for chunk in response.aiter_raw():
                    *whole, rest = (rest + chunk).split(b"\n\n")
                    self.content += b"".join(frame + b"\n\n" for frame in whole)
            return True
        except UNREACHABLE:
            assert self.place, "the gateway died before it answered"
            return False
