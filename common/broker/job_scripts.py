"""Scripts of jobs: one function for each Lua script of `common/scripts/jobs.lua`."""

from collections.abc import Iterable, Sequence

from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS, Keys, request_keys
from common.broker.lua import Args, ScriptCall, call_script, decode_all

NOT_A_JOB = -1
FRAMES_LOST = -2
"""What `reply` answers when nothing was sent: the job's key has another type, or the broker has lost frames
before these.
"""


def register_job(keys: Keys, job_id: str, *, digest: str, channel: str, in_stream: bool) -> ScriptCall[str]:
    """Register a job. The reply is `live`, `ended`, `conflict` or `spoiled`.

    Args:
        channel: that gets the frames, or "".
        in_stream: whether the job's stream gets them, too.
    """
    args: Args = {
        "digest": digest,
        "ttl_ms": JOB_TTL_MS,
        "channel": channel,
        "in_stream": int(in_stream),
        "reply_ttl_ms": RESULT_TTL_MS,
    }
    return call_script("register_job", bytes.decode, keys, job_id, args=args)


def claim_jobs(keys: Keys, *, group: str, dead: bytes, claimer: str, max_jobs: int) -> ScriptCall[list[str]]:
    """Claim the jobs of a dead gateway for another. The reply has the ids of their entries."""
    gateway = dead.decode(errors="surrogateescape")
    args: Args = {"group": group, "dead": dead, "claimer": claimer, "max_jobs": max_jobs}
    return call_script("claim_jobs", decode_all, keys, gateway, args=args)


def cancel_job(keys: Keys, job_id: str, *, mark_ttl_ms: int) -> ScriptCall[int]:
    """Cancel a job. The reply is as how many requests it was admitted, or -1 when it has ended.

    Args:
        mark_ttl_ms: how long the cancel of an unknown job is kept.
    """
    return call_script("cancel_job", int, keys, job_id, args={"mark_ttl_ms": mark_ttl_ms})


def reply(
    keys: Keys,
    job_id: str,
    *,
    channel: str,
    max_entries: int,
    request_ttl_ms: int,
    answer: bytes,
    request_ids: Iterable[str],
    frames: Sequence[tuple[int, int, bytes]],
    num_heard: int,
) -> ScriptCall[int]:
    """Send the new frames of a job, and store its answer. The reply is how many were new, NOT_A_JOB or
    FRAMES_LOST.

    Args:
        channel: that gets the frames, or "".
        max_entries: of the job's stream; 0 for none.
        answer: b"" while it goes on.
        request_ids: whose keys expire with the answer, after `request_ttl_ms`.
        frames: lane, index in its lane, text of each.
        num_heard: how many of the first frames the channel has heard already.
    """
    args: Args = {
        "channel": channel,
        "max_entries": max_entries,
        "ttl_ms": RESULT_TTL_MS,
        "request_ttl_ms": request_ttl_ms,
        "job_ttl_ms": JOB_TTL_MS,
        "answer": answer,
        "num_heard": num_heard,
    }
    return call_script(
        "reply",
        int,
        keys,
        job_id,
        args=args,
        more_keys=[*request_keys(keys, request_ids), *map(keys.logits, request_ids)],
        more_args=[part for frame in frames for part in frame],
    )
