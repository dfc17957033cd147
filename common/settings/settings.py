"""Every setting of every process: environment variables and flags under TGI's names.

A field `max_batch_size` is the variable `MAX_BATCH_SIZE` and the flag `--max-batch-size`; a flag wins over
its variable, a variable over the default. Settings are frozen: what a process learns at run time (capacity,
limits) travels in messages. Options of other servers that are no field here are answered in
`common/settings/options.txt`.
"""

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from common.settings import flags
from common.settings.fields import (
    AdapterSource,
    SettingError,
    SettingFields,
    hide_users,
    key_of_secret,
    one_line_errors,
    read_adapters,
)
from common.settings.flags import OPTIONS, check_option
from common.settings.ranges import read_defaults
from common.settings.speculation import Speculation, read_speculation

__all__ = ["SettingError", "Settings"]

MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000
POOL_NAME = re.compile(r"[\w./:@-]{1,200}")
OF_ONE_MODEL = (
    "revision",
    "runner",
    "quantize",
    "tokenizer_config_path",
    "chat_template",
    "override_generation_config",
    "speculative_config",
    "rope_scaling",
    "rope_factor",
    "max_total_tokens",
    "max_input_tokens",
    "tool_call_parser",
    "reasoning_parser",
    "lora_adapters",
)
"""Settings that belong to MODEL_ID; other models of MODELS have the defaults."""
SECRETS = ("api_key", "webhook_secret")
"""Settings whose value is never a word for their default."""
ENDPOINT = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


class Settings(SettingFields):
    """The settings of a fleet, and what follows from them."""

    @classmethod
    def read(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str] | None = None,
        prog: str = "tokenfleet",
        description: str = "",
    ) -> "Settings":
        """Settings from flags, then variables, then defaults. `prog` and `description` are for the help.

        Raises:
            SettingError: an unknown flag (the nearest of ours is named), a value of the wrong type or out of
                range, or what is not served.
        """
        given = flags.read(argv, os.environ if environ is None else environ, prog, description)
        texts = {
            name: value.text
            for name, value in given.items()
            if name in cls.model_fields
            if name in SECRETS or cls.model_fields[name].default is not None or value.text.lower() != "auto"
        }
        with one_line_errors({name: value.name for name, value in given.items()}, texts):
            settings = cls.model_validate(texts)
        if settings.models:
            settings = with_models(settings, has_model="model_id" in texts)
        for name, value in given.items():
            if (option := OPTIONS.get(name)) is not None:
                check_option(option, value)
        settings.check()
        return settings

    def check(self) -> None:
        """Check what the type of a field does not say. Raises SettingError."""
        _ = (self.weights, self.urls_of_pools, self.adapters, self.sampling_overrides, self.speculation)
        for name, cause in self.faults():
            raise SettingError(name, cause)

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield settings that contradict others, or cannot be used, and why."""
        for name in ("api_key", "compute_type"):
            if (text := getattr(self, name)) and not (text.isascii() and text.isprintable()):
                yield name, "cannot be sent as a header: it must be printable ASCII"
        if self.webhook_secret:
            try:
                key_of_secret(self.webhook_secret)
            except ValueError as error:
                yield "webhook_secret", str(error)
        if self.otlp_endpoint and not ENDPOINT.fullmatch(self.otlp_endpoint):
            shown = hide_users(self.otlp_endpoint)
            yield "otlp_endpoint", f"{shown!r} is no URL as http://collector:4317 or https://…"
        if self.worker_ttl_s < 2 * self.heartbeat_s:
            yield "worker_ttl_s", f"{self.worker_ttl_s} is less than twice HEARTBEAT_S ({self.heartbeat_s})"
        if None not in (self.sharded, self.num_shard) and self.sharded != (self.num_ranks != 1):
            shown = str(self.sharded).lower()
            yield "sharded", f"{shown} and {self.num_ranks} ranks (NUM_SHARD) contradict each other"
        if self.rope_scaling and self.rope_factor is None:
            yield "rope_scaling", f"{self.rope_scaling} needs ROPE_FACTOR"
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield "max_cpu_loras", f"{self.max_cpu_loras} is less than MAX_LORAS ({self.max_loras})"
        if self.speculation.model and self.pipeline_parallel_size > 1:
            cause = "a model that proposes tokens cannot be combined with PIPELINE_PARALLEL_SIZE"
            yield "speculative_config", cause
        if self.demo and not ipaddress.ip_address(self.listen_host).is_loopback:
            yield "demo", "lets everybody who sees the page kill processes: it is for HOSTNAME=127.0.0.1 only"
        for name in ("max_total_tokens", "max_batch_total_tokens"):
            tokens, limit = self.max_input_tokens, getattr(self, name)
            if tokens and limit and tokens >= limit:
                cause = f"{tokens} is not less than {name.upper()} ({limit}), which counts new tokens, too"
                yield "max_input_tokens", cause
        tokens, limit = self.max_total_tokens, self.max_batch_total_tokens
        if tokens and limit and tokens > limit:
            yield "max_total_tokens", f"{tokens} is more than MAX_BATCH_TOTAL_TOKENS ({limit}) allows"
        names = [self.pool, *(name for name, _ in map(read_model, self.models))]
        for name in names[1:]:
            if names.count(name) > 1:
                cause = f"{name!r} is the name of two models: give one another name, as other={name}"
                yield "models", cause
        if self.models and self.nnodes > 1:
            yield "models", f"a worker on several machines (NNODES {self.nnodes}) serves one model"

    @property
    def num_ranks(self) -> int:
        """Ranks that run one model together, as far as NUM_SHARD says: it may be the number of GPUs."""
        return (self.num_shard or 1) * self.pipeline_parallel_size

    @property
    def weights(self) -> dict[str, float]:
        """The weights of tenants; a tenant that is not there has 1."""
        return dict(map(read_weight, self.tenant_weights))

    @property
    def urls_of_pools(self) -> dict[str, str]:
        """The URLs of other pools' brokers, where they are set."""
        return dict(map(read_pool_url, self.pool_urls))

    @property
    def adapters(self) -> list[AdapterSource]:
        """The adapters that are served from the start."""
        return read_adapters(self.lora_adapters)

    @property
    def sampling_overrides(self) -> dict[str, float]:
        """Sampling values of /v1 that replace the model's."""
        return read_defaults("override_generation_config", self.override_generation_config or "{}")

    @property
    def speculation(self) -> Speculation:
        """How tokens are proposed. Raises SettingError."""
        return read_speculation(self.speculate, self.speculative_config)

    @property
    def other_models(self) -> dict[str, str]:
        """The pools of MODELS, and the model of each."""
        return dict(map(read_model, self.models))

    @property
    def pools(self) -> tuple[str, ...]:
        """All pools that a worker with these settings serves in turns, MODEL_ID's own first."""
        return (self.pool, *self.other_models)

    def of_pool(self, pool: str) -> "Settings":
        """The settings of one of `pools`."""
        return self if pool == self.pool else self.of_model(pool, self.other_models[pool])

    def of_model(self, pool: str, model_id: str, tokenizer_name: str | None = None) -> "Settings":
        """The settings of another model's pool: without what belongs to our own model. Its requests wait
        while it has no worker.
        """
        own = {name: type(self).model_fields[name].default for name in OF_ONE_MODEL}
        changed = {"pool": pool, "model_id": model_id, "tokenizer_name": tokenizer_name, "models": ()}
        return self.model_copy(update=own | changed | {"served_model_name": (pool,), "scale_to_zero": True})

    @property
    def makes_weights(self) -> bool:
        """Whether weights are random, so that none are needed."""
        return self.load_format == "dummy"

    @property
    def cpu_cache_bytes(self) -> int:
        """Bytes of the KV cache of a worker on CPU."""
        return self.kv_cache_bytes or 2**30

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        return self.served_model_name[0] if self.served_model_name else self.model_id

    @property
    def given_model_id(self) -> str:
        """MODEL_ID before the launcher put the model's directory in its place (`prepare.with_model`)."""
        return self.served_model_name[-1] if self.served_model_name else self.model_id

    @property
    def listen_host(self) -> str:
        """The address to listen on. A machine's name means all addresses, as in TGI: containers set
        HOSTNAME to theirs.
        """
        try:
            return str(ipaddress.ip_address(self.hostname))
        except ValueError:
            return "127.0.0.1" if self.hostname == "localhost" else "0.0.0.0"

    def environ(self) -> dict[str, str]:
        """The variables that give a child process these settings; an empty one gives none."""
        return {
            name.upper(): ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
            for name, value in self.model_dump().items()
        }


def with_models(settings: Settings, has_model: bool) -> Settings:
    """Settings with MODELS. Without MODEL_ID the first of them is it. Requests wait while a model sleeps."""
    changed: dict[str, object] = {"scale_to_zero": True}
    if not has_model:
        name, model_id = read_model(settings.models[0])
        names = (*settings.served_model_name, *(() if name == model_id else (name,)))
        changed |= {"model_id": model_id, "models": settings.models[1:], "served_model_name": names}
    return settings.model_copy(update=changed)


def read_model(word: str) -> tuple[str, str]:
    """A pool and its model, of `small=Qwen/Qwen3-0.6B`. A model without a name has its id's, or that of its
    file or folder. Raises SettingError.
    """
    name, equals, model_id = word.partition("=")
    if not equals:
        name, model_id = word, word
        if word.startswith(("/", ".", "~")) or word.endswith(".gguf"):
            name = PurePath(word).name.removesuffix(".gguf")
    if not POOL_NAME.fullmatch(name) or not model_id:
        cause = f"{word!r} is not a model, or a name and a model as small=Qwen/Qwen3-0.6B"
        raise SettingError("models", cause)
    return name, model_id


def read_weight(word: str) -> tuple[str, float]:
    """A tenant and its weight, of `alice=4`. Raises SettingError."""
    tenant, _, text = word.partition("=")
    with contextlib.suppress(ValueError):
        if tenant and MIN_WEIGHT <= float(text) <= MAX_WEIGHT:
            return tenant, float(text)
    raise SettingError(
        "tenant_weights", f"{word!r} is not a tenant and a weight of {MIN_WEIGHT} to {MAX_WEIGHT}, as alice=4"
    )


def read_pool_url(word: str) -> tuple[str, str]:
    """A pool and its broker's URL, of `a=redis://host`. Raises SettingError, without the URL: it may hold a
    password.
    """
    pool, _, url = word.partition("=")
    if pool and "://" in url:
        return pool, url
    raise SettingError("pool_urls", f"pool {pool!r} has no URL, as in a=redis://host:6379,b=redis://…")
