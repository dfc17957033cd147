"""Types of settings: the range and the spellings of a value, checked by pydantic; webhooks' secrets; and the
adapters that LORA_ADAPTERS names, in TGI's spellings and in vLLM's.
"""

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from common.ids import ADAPTER_NAME, REVISION

T = TypeVar("T")
WEEK_S = 7 * 86_400
MAX_PORT = 65_535
MAX_NUMBER = 2**53
"""Lua scripts count in doubles, which are exact up to here."""
MAX_PROCESSES = 1024
"""Processes of one kind, or threads: more than a machine can use, but too few to stop it."""
NEXT_URL = r",(?=[^,=/:?]+=)"
"""The comma before the next `pool=`: a URL of Sentinel has commas itself, which no name follows."""
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
LEVELS = {"trace": "debug", "warn": "warning", "critical": "error"}
KV_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"}
DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
LOAD_FORMATS = dict.fromkeys(("safetensors", "fastsafetensors", "runai_streamer"), "auto")
"""vLLM's names of ways to read files of safetensors."""
UNSERVED_METHODS = {
    "exl2": "ExLlamaV2's layout of weights is not read; checkpoints of GPTQ and AWQ are",
    "exl3": "ExLlamaV3's layout of weights is not read; checkpoints of GPTQ and AWQ are",
    "marlin": "weights packed for Marlin's kernel are not read; checkpoints of GPTQ and AWQ are",
}
"""Methods of TGI without transformers' quantizer → the reason why they are refused."""


class SettingError(Exception):
    """A setting that cannot be served. `str()` is the one line a person sees: the setting and the cause."""

    def __init__(self, name: str, cause: str) -> None:
        self.name = name
        self.cause = cause
        super().__init__(f"{name if name.startswith('-') else name.upper()}: {cause}")


def to_number(value: Any) -> Any:
    """4096 of `4KiB`, 4000 of `4k`; a text without a unit is left as it is."""
    if isinstance(value, str) and value[-1:].isalpha():
        with contextlib.suppress(ValidationError):
            return int(TypeAdapter(ByteSize).validate_python(value))
    return value


def to_num_pictures(value: Any) -> Any:
    """The number of pictures in vLLM's limits, as `{"image": 2}`; others stay as they are."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    with contextlib.suppress(ValueError):
        limits = json.loads(value)
        found = limits.get("image", limits)
        return found.get("count", value) if isinstance(found, dict) else found
    return value


def to_list(value: Any, comma: str = ",") -> Any:
    """The words of a text; `comma` is a regex of what divides them."""
    if not isinstance(value, str):
        return value
    return [word.strip() for word in re.split(comma, value) if word.strip()]


def to_level(text: str) -> str:
    """The general level of a filter as in `info,text_generation_router=debug`."""
    level = text.split(",")[0].strip().lower()
    return LEVELS.get(level, level)


def to_method(text: str) -> str:
    """A method's name with dashes. Names of kernels (`awq_marlin`) are those of their method. Raises
    PydanticCustomError for a method of TGI that is not served.
    """
    method = text.lower().removesuffix("_marlin").replace("_", "-")
    if method in UNSERVED_METHODS:
        raise PydanticCustomError("unserved", "{why}", {"why": UNSERVED_METHODS[method]})
    return method


def spelled(names: Mapping[str, str]) -> BeforeValidator:
    """A validator that takes a value in any letters, and under other names."""
    return BeforeValidator(lambda text: names.get(text.lower(), text.lower()))


Number = Annotated[int, BeforeValidator(to_number), Field(ge=0, le=MAX_NUMBER)]
Count = Annotated[Number, Field(ge=1)]
NumPictures = Annotated[Number, BeforeValidator(to_num_pictures)]
Processes = Annotated[Number, Field(ge=1, le=MAX_PROCESSES)]
Port = Annotated[Number, Field(le=MAX_PORT)]
Seconds = Annotated[float, Field(ge=0, le=WEEK_S)]
Words = Annotated[tuple[str, ...], BeforeValidator(to_list)]
PoolUrls = Annotated[tuple[str, ...], BeforeValidator(lambda value: to_list(value, NEXT_URL))]
Url = Annotated[str, BeforeValidator(lambda text: text.strip().replace("grpc://", "http://", 1))]
"""A URL of HTTP; `grpc://` is vLLM's spelling of a receiver of traces."""
Device = Annotated[Literal["auto", "cpu", "cuda"], spelled({})]
Dtype = Annotated[Literal["auto", "float32", "float16", "bfloat16"], spelled(DTYPES)]
KVCacheDtype = Annotated[Literal["auto", "fp8_e4m3", "fp8_e5m2"], spelled(KV_DTYPES)]
LoadFormat = Annotated[Literal["auto", "dummy"], spelled(LOAD_FORMATS)]
LogprobsMode = Annotated[
    Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"], spelled({})
]
Runner = Annotated[Literal["auto", "generate", "pooling"], spelled({})]
RopeScaling = Annotated[Literal["linear", "dynamic"], spelled({})]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(to_level)]
Quantize = Annotated[str, BeforeValidator(to_method)]
"""A worker refuses a method that its model does not have (gpu_worker/engine/model/weights.py)."""


SECRET_PREFIX = "whsec_"
MIN_SECRET, MAX_SECRET = 24, 64
"""Bytes of a webhook's secret, by Standard Webhooks."""


def key_of_secret(secret: str) -> bytes:
    """The bytes of a webhook's secret. Raises ValueError, which says how a secret must look."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET <= len(key) <= MAX_SECRET:
        raise ValueError(f"must be {SECRET_PREFIX} and the base64 of {MIN_SECRET} to {MAX_SECRET} bytes")
    return key


@contextlib.contextmanager
def one_line_errors(names: Mapping[str, str], texts: Mapping[str, str]) -> Iterator[None]:
    """Make a SettingError of pydantic's first error; `names` and `texts` are what the person wrote."""
    try:
        yield
    except ValidationError as errors:
        error: Any = errors.errors()[0]
        field = str(error["loc"][0]) if error["loc"] else ""
        raise SettingError(names[field], describe(error, texts[field])) from errors


def describe(error: Mapping[str, Any], text: str) -> str:
    limits = error.get("ctx", {})
    if error["type"] == "unserved":
        return f"{text} is not served: {limits['why']}"
    kind = error["type"].split("_")[0]
    if kind in ("greater", "less") and text.lower() == "nan":
        return f"{text!r} is not a number"
    if kind == "greater":
        return f"{text} is less than {str(limits['ge']).removesuffix('.0')}"
    if kind == "less":
        return f"{text} is more than {str(limits['le']).removesuffix('.0')}"
    if kind == "literal":
        choices = limits["expected"].replace("'", "").replace(" or ", ", ")
        return f"{text!r} is not one of {choices}"
    is_unit_unknown = kind == "int" and text[:1].isdigit() and text[-1:].isalpha()
    unit = "; units are as in 4k or 64MiB" if is_unit_unknown else ""
    return f"{text!r} is not {KINDS[kind]}{unit}"


def first_error(errors: ValidationError) -> str:
    """The first of pydantic's errors in an object: the field, and what is wrong with it."""
    error = errors.errors()[0]
    place = ".".join(map(str, error["loc"]))[:64]
    return f"{place and f'`{place}`: '}{error['msg']}"


def convert(kind: type[T], text: str, name: str) -> T:
    """The value of type `kind` that a text gives. Raises SettingError of `name`."""
    with one_line_errors({"": name}, {"": text}):
        return TypeAdapter(kind).validate_python(text)


NEXT_ADAPTER = r",(?![^{]*\})"
"""A comma between two adapters: not one inside of a JSON object."""


class AdapterSource(NamedTuple):
    """An adapter as a person names it.

    Attributes:
        path: its folder, or its hub id, perhaps with `@revision`.
    """

    name: str
    path: str


def to_adapters(value: Any) -> Any:
    """Words `name=path`, of `id`, `id@revision`, `name=path@revision`, or `{"name": …, "path": …}`."""
    if not isinstance(value, str):
        return value
    return [*map(to_word, to_list(value.strip().removeprefix("[").removesuffix("]"), NEXT_ADAPTER))]


def to_word(word: str) -> str:
    """Raises PydanticCustomError for JSON that is no adapter."""
    if not word.startswith("{"):
        return word
    try:
        found = json.loads(word)
        return f"{found['name']}={found['path']}"
    except (ValueError, KeyError, TypeError):
        why = 'an adapter in JSON is as {"name": "sql", "path": "/adapters/sql"}'
        raise PydanticCustomError("unserved", "{why}", {"why": why}) from None


LoraAdapters = Annotated[tuple[str, ...], BeforeValidator(to_adapters)]


def read_adapter(word: str) -> AdapterSource:
    """An adapter of LORA_ADAPTERS; one without a name has its id's. Raises SettingError."""
    name, equals, path = word.partition("=")
    if not equals:
        path, (name, at, revision) = word, word.partition("@")
        if at and not REVISION.fullmatch(revision):
            raise SettingError("lora_adapters", f"{word!r} has no revision after the @")
    if not ADAPTER_NAME.fullmatch(name) or not path:
        cause = f"{word!r} is not an adapter, as sql=/adapters/sql, org/adapter or sql=org/adapter@revision"
        raise SettingError("lora_adapters", cause)
    return AdapterSource(name, path)


def read_adapters(words: tuple[str, ...]) -> list[AdapterSource]:
    """The adapters of LORA_ADAPTERS. Raises SettingError, also for two of one name."""
    found = [read_adapter(word) for word in words]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise SettingError("lora_adapters", f"{name!r} is the name of two adapters")
    return found
