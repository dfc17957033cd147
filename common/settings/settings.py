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
from collections.abc import Mapping, Sequence

from common.settings import flags
from common.settings.fields import SettingFields
from common.settings.option import OTHERS, check_option
from common.settings.ranges import read_overrides
from common.settings.types import SettingError, one_line_errors

__all__ = ["SettingError", "Settings"]

MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000
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
            if cls.model_fields[name].default is not None or value.text.lower() != "auto"
        }
        with one_line_errors({name: value.name for name, value in given.items()}, texts):
            settings = cls.model_validate(texts)
        for name, value in given.items():
            if (option := OTHERS.options.get(name)) is not None:
                check_option(option, value)
        settings.check()
        return settings

    def check(self) -> None:
        """Check what the type of a field does not say. Raises SettingError."""
        if self.worker_ttl_s < 2 * self.heartbeat_s:
            raise SettingError(
                "worker_ttl_s", f"{self.worker_ttl_s} is less than twice HEARTBEAT_S ({self.heartbeat_s})"
            )
        if None not in (self.sharded, self.num_shard) and self.sharded != (self.num_ranks != 1):
            raise SettingError(
                "sharded",
                f"{str(self.sharded).lower()} and {self.num_ranks} ranks (NUM_SHARD) contradict each other",
            )
        self.check_tokens()
        if self.rope_scaling and self.rope_factor is None:
            raise SettingError("rope_scaling", f"{self.rope_scaling} needs ROPE_FACTOR")
        if self.api_key and not is_header(self.api_key):
            raise SettingError("api_key", "cannot be sent as a header: it must be printable ASCII")
        if self.compute_type and not is_header(self.compute_type):
            raise SettingError(
                "compute_type",
                f"{self.compute_type!r} cannot be sent as a header: it must be printable ASCII",
            )
        if self.otlp_endpoint and not ENDPOINT.fullmatch(self.otlp_endpoint):
            raise SettingError(
                "otlp_endpoint", f"{self.otlp_endpoint!r} is no URL as http://collector:4317 or https://…"
            )
        for word in self.tenant_weights:
            read_weight(word)
        read_overrides(self.override_generation_config or "{}")
        if self.demo and not ipaddress.ip_address(self.listen_host).is_loopback:
            raise SettingError(
                "demo", "lets everybody who sees the page kill processes: it is for HOSTNAME=127.0.0.1 only"
            )

    def check_tokens(self) -> None:
        """Check that a request has room for a new token, and a worker for a request."""
        for name in ("max_total_tokens", "max_batch_total_tokens"):
            tokens, limit = self.max_input_tokens, getattr(self, name)
            if tokens and limit and tokens >= limit:
                cause = f"{tokens} is not less than {name.upper()} ({limit}), which counts new tokens, too"
                raise SettingError("max_input_tokens", cause)
        tokens, limit = self.max_total_tokens, self.max_batch_total_tokens
        if tokens and limit and tokens > limit:
            raise SettingError(
                "max_total_tokens", f"{tokens} is more than MAX_BATCH_TOTAL_TOKENS ({limit}) allows"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks that run one model together, as far as NUM_SHARD says: it may be the number of GPUs."""
        return (self.num_shard or 1) * self.pipeline_parallel_size

    @property
    def weights(self) -> dict[str, float]:
        """The weights of tenants; a tenant that is not there has 1."""
        return dict(map(read_weight, self.tenant_weights))

    @property
    def sampling_overrides(self) -> dict[str, float]:
        """Sampling values of /v1 that replace the model's."""
        return read_overrides(self.override_generation_config or "{}")

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
    def listen_host(self) -> str:
        """The address to listen on. A machine's name means all addresses, as in TGI: containers set
        HOSTNAME to theirs.
        """
        try:
            return str(ipaddress.ip_address(self.hostname))
        except ValueError:
            return "127.0.0.1" if self.hostname == "localhost" else "0.0.0.0"

    def environ(self) -> dict[str, str]:
        """The variables that give a child process these settings."""
        return {
            name.upper(): ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in self.model_dump(exclude_none=True).items()
        }


def is_header(text: str) -> bool:
    """Whether a text arrives as the value of a header as it was sent."""
    return text.isascii() and text.isprintable()


def read_weight(word: str) -> tuple[str, float]:
    """A tenant and its weight, of `alice=4`. Raises SettingError."""
    tenant, _, text = word.partition("=")
    with contextlib.suppress(ValueError):
        if tenant and MIN_WEIGHT <= float(text) <= MAX_WEIGHT:
            return tenant, float(text)
    raise SettingError(
        "tenant_weights", f"{word!r} is not a tenant and a weight of {MIN_WEIGHT} to {MAX_WEIGHT}, as alice=4"
    )
