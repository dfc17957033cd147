"""Ids: the pattern of each id that comes from outside (in a body, a header, a URL or an entry in Redis) and
becomes a part of a key or of a path. Whoever makes a key or a path of one checks it here with `fullmatch`.
docs/security.md says where each comes in, and whose it must be.
"""

import re

REQUEST_ID = re.compile(r"[0-9a-f]{32}")
FRAME_ID = re.compile(r"([0-9a-f]{32})(?:/([0-9]{1,9}))?")
"""An answer to be read on, perhaps with the number of the last frame that its client has."""
RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
ITEM_ID = re.compile(r"(?:msg|fc|fco|rs)_([0-9a-f]{32})_i?[0-9]{1,7}")
"""An item of a response's conversation."""
FILE_ID = re.compile(r"file-[0-9a-f]{32}(output|error)?")
"""An uploaded file, or a file of a batch."""
FILE_PART = re.compile(r"[0-9]{9}(-[0-9]{1,19})?")
"""A part of a file; those of a batch's files have the epoch of their writer."""
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
EVENT_ID = re.compile(r"evt_[0-9a-f]{32}")
"""An event of a webhook."""
JOB_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")
"""A job of a service. Its requests are `{id}#{choice}`, which no job can have as its id."""
CHANNEL = re.compile(f"ext:{JOB_ID.pattern}")
"""Where the frames of a job go."""
BATCH_LINE_ID = re.compile(rf"{BATCH_ID.pattern}/.*")
"""A line of a batch, which is a job of the fleet's own: no service can name one."""
ENTRY_ID = re.compile(rb"[0-9]{1,15}-[0-9]{1,20}")
KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Public name of an API key."""
TENANT = re.compile(r"[A-Za-z0-9._:@/+~-]{1,64}")
"""`=` and `,` divide TENANT_WEIGHTS."""
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
"""Only its digest, together with its tenant's, becomes a part of a key."""
CLIENTS_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
"""What a client calls its request; it is echoed and logged, and part of no key."""
ADAPTER_NAME = re.compile(r"[\w./:+-]{1,128}")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""A model or an adapter on the model hub: a folder in its cache."""
REVISION = re.compile(r"(?!(.*/)?\.{1,2}(/|$))[\w.-][\w./-]{0,199}")
"""A revision on the model hub: a file in its cache, so it has no `..`."""


def is_job_id(text: str) -> bool:
    """Whether a service may give a job this id."""
    return JOB_ID.fullmatch(text) is not None and BATCH_LINE_ID.fullmatch(text) is None
