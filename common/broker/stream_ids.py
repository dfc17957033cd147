"""Stream ids of Redis, as pairs of numbers that compare in order."""


def parse_stream_id(stream_id: bytes | str) -> tuple[int, int]:
    """(milliseconds or epoch, number) of a stream id."""
    text = stream_id.decode() if isinstance(stream_id, bytes) else stream_id
    high, _, low = text.partition("-")
    return int(high), int(low or 0)
