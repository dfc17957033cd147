"""Key file: the API keys in the YAML file that API_KEYS_FILE names.

keys:
  - key_id: reports
    digest: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    tenant: acme
    requests_per_minute: 60
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.api_keys import STATIC_KEY_ID, ApiKey, digest_of
from common.key_fields import FileKeyFields
from common.settings.settings import SettingError

NAME = "api_keys_file"
MAX_BYTES = 16 * 2**20


class KeyFileContent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[FileKeyFields] = Field(max_length=10_000)


def read_key_file(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises SettingError with the line and the field at fault."""
    try:
        text = path.read_bytes()[: MAX_BYTES + 1]
    except OSError as error:
        raise SettingError(NAME, f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise SettingError(NAME, f"{path} is larger than {MAX_BYTES} bytes")
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingError(NAME, f"{path} is not YAML: {' '.join(str(error).split())}") from error
    try:
        parsed = KeyFileContent.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise at_line(path, root, problem["loc"], problem["msg"]) from error
    return to_records(path, root, parsed)


def to_records(path: Path, root: yaml.Node | None, content: KeyFileContent) -> list[ApiKey]:
    """Raises SettingError for a key without a text, and for two keys that are the same."""
    records: list[ApiKey] = []
    ids, digests = {STATIC_KEY_ID}, set[str]()
    for i, one in enumerate(content.keys):
        if (one.key is None) == (one.digest is None):
            raise at_line(path, root, ("keys", i), "give either `key` or `digest`, its SHA-256")
        digest = one.digest or digest_of(one.key or "")
        if one.key_id in ids:
            raise at_line(path, root, ("keys", i, "key_id"), f"{one.key_id!r} is the name of another key")
        if digest in digests:
            raise at_line(path, root, ("keys", i), "another entry has the same key")
        ids.add(one.key_id)
        digests.add(digest)
        fields = one.model_dump(exclude={"key_id", "key", "digest"})
        records.append(
            ApiKey(**fields | {"key_id": one.key_id, "digest": digest, "tenant": one.tenant or one.key_id})
        )
    return records


def at_line(path: Path, root: yaml.Node | None, place: tuple[int | str, ...], why: str) -> SettingError:
    """The error of a place in the file, as (`keys`, 2, `weight`)."""
    node = root
    for step in place:
        node = child_of(node, step) or node
    line = node.start_mark.line + 1 if node is not None else 1
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    name = "".join(steps).removeprefix(".") or "the file"
    return SettingError(NAME, f"{path}, line {line}, `{name}`: {why}")


def child_of(node: Any, step: int | str) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        child: yaml.Node = node.value[step]
        return child
    if isinstance(node, yaml.MappingNode):
        found: list[yaml.Node] = [value for name, value in node.value if name.value == step]
        return found[0] if found else None
    return None
