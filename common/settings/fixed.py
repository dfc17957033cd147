"""Fixed limits: numbers that bound what clients may do and that nobody had a reason to set; no settings."""

from typing import ClassVar


class FixedLimits:
    """What `Settings` have besides their fields; each is the same for all fleets."""

    head_timeout_s: ClassVar[float] = 20.0
    """time in which a client must send a whole head, from its connection or first byte on (s)"""
    body_timeout_s: ClassVar[float] = 60.0
    """time in which a client must send a whole body, from the end of its head on (s)"""
    keep_alive_timeout_s: ClassVar[float] = 620.0
    """how long a connection without a request is kept: longer than clients and proxies keep theirs (s)"""
    max_tokenized_bytes: ClassVar[int] = 4_000_000
    """text that a gateway tokenizes at once (bytes); more waits, and a text that is longer goes alone"""
    max_picture_pixels: ClassVar[int] = 2**25
    """pixels of one picture; it is refused before it is decoded"""
    picture_fetch_timeout_s: ClassVar[float] = 10.0
    """time in which a picture must be fetched, redirects included (s)"""
    picture_cache_bytes: ClassVar[int] = 256 * 2**20
    """encoded pictures that a worker's engine keeps for further requests, of a model that sees"""
    picture_payload_limit: ClassVar[int] = 24_000_000
    """largest request body where the model sees pictures, which are sent in it as base64 (bytes)"""
    max_kept_pictures_bytes: ClassVar[int] = 512 * 2**20
    """pictures of all live requests in the broker (bytes); each is there once"""
    max_batch_lines: ClassVar[int] = 50_000
    """requests of one batch"""
    max_batches: ClassVar[int] = 10_000
    """batches that the pool keeps; those that have ended leave first"""
    batch_window: ClassVar[int] = 256
    """requests of one batch that are queued or computed at once"""
    max_files: ClassVar[int] = 10_000
    """files that one tenant may keep"""
    max_unread_bytes: ClassVar[int] = 256 * 2**20
    """unread answers in a gateway (bytes); beyond it the client that read nothing for longest is cut off"""
    max_jobs: ClassVar[int] = 256
    """arq jobs that one job worker waits for at once"""
    max_head_bytes: ClassVar[int] = 64 * 2**10
    """longest head of a request: its request line and headers (bytes)"""
