"""Logits in responses: base64 beside shape and dtype in JSON, or tensors of a safetensors file.

The file is the format of https://huggingface.co/docs/safetensors: the length of its header, the header, which
is JSON, and the bytes of all tensors. Its metadata has the response, whose fields name their tensors.
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from api.json import to_json
from api.streams.stream import Stream

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of dtypes in a safetensors file."""
ENCODED_AT_ONCE = 3 * 2**16
"""Bytes encoded in one call, a multiple of 3: other threads wait for no longer."""
ALIGNMENT = 8
"""The header of a safetensors file ends at a multiple of it."""


LOGITS = {"dtype": "float32", "shape": [2, 49152], "data?": "AACAPw==", "tensor?": "generation_logits"}
"""For /docs. `data` is base64, a row for each token, a column for each id; `tensor` is its name in a file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor of a response: its little-endian values, row after row."""

    name: str
    dtype: str
    shape: tuple[int, int]
    values: memoryview


@dataclass(slots=True)
class LogitsRenderer:
    """Renders the logits of one response.

    Attributes:
        as_file: whether the response is a safetensors file.
        tensors: those of the file so far.
    """

    as_file: bool = False
    tensors: list[Tensor] = field(default_factory=list)

    def fields(self, stream: Stream, num_tokens: int, path: str = "") -> dict[str, Any]:
        """The fields `context_logits` and `generation_logits` of a finished stream, as far as they were
        requested.

        Args:
            num_tokens: generated tokens that the response has.
            path: of the object that has the fields; it ends with a dot.
        """
        return {
            tensor.name.removeprefix(path): self.render(tensor)
            for tensor in tensors_of(stream, num_tokens, path)
        }

    def render(self, tensor: Tensor) -> dict[str, Any]:
        known = {"dtype": tensor.dtype, "shape": tensor.shape}
        if not self.as_file:
            return known | {"data": orjson.Fragment(b'"%b"' % to_base64(tensor.values))}
        self.tensors.append(tensor)
        return known | {"tensor": tensor.name}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response, where it is a file."""
        return {"content-type": "application/octet-stream"} if self.as_file else {}

    def body(self, response: bytes) -> bytes:
        """The body of the response, given its JSON."""
        return to_safetensors(response, self.tensors) if self.as_file else response


def tensors_of(stream: Stream, num_tokens: int, path: str) -> Iterator[Tensor]:
    """Yield the logits of the prompt, and those of the generated tokens, as far as they were requested."""
    logits, num_prompt = stream.request.logits, len(stream.prompt_ids)
    if logits is None:
        return
    first = logits.first_position(num_prompt)
    rows = [("context_logits", 0, num_prompt)] if logits.context else []
    rows += [("generation_logits", num_prompt - 1, num_tokens)] if logits.generation else []
    values = memoryview(stream.logits or b"")
    for name, position, count in rows:
        begin = (position - first) * logits.row_bytes
        shape = count, logits.vocab_size
        yield Tensor(path + name, logits.dtype, shape, values[begin : begin + count * logits.row_bytes])


def to_base64(values: memoryview) -> bytes:
    return b"".join(
        b64encode(values[i : i + ENCODED_AT_ONCE]) for i in range(0, len(values), ENCODED_AT_ONCE)
    )


def to_safetensors(response: bytes, tensors: Sequence[Tensor]) -> bytes:
    """A safetensors file of the tensors; `response` is in its metadata."""
    header: dict[str, Any] = {"__metadata__": {"response": response.decode()}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + len(tensor.values)
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    packed = to_json(header)
    packed += b" " * (-len(packed) % ALIGNMENT)
    return b"".join([len(packed).to_bytes(8, "little"), packed, *(tensor.values for tensor in tensors)])
