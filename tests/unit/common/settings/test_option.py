"""vLLM's common flags mean ours, and what is refused is refused by the name that the person used."""

from typing import Any

import pytest

from common.settings.option import ANY, OTHERS, SAME, TABLE, read_rows
from common.settings.settings import SettingError, Settings

PATH = "/some/path"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--model", "org/model"], "model_id", "org/model"),
        (["--max-model-len", "512"], "max_total_tokens", 512),
        (["--host", "127.0.0.1"], "hostname", "127.0.0.1"),
        (["--gpu-memory-utilization", "0.9"], "cuda_memory_fraction", 0.9),
        (["--max-num-seqs", "8"], "max_batch_size", 8),
        (["--max-num-batched-tokens", "256"], "max_batch_prefill_tokens", 256),
        (["--data-parallel-size", "2"], "num_workers", 2),
        (["--download-dir", PATH], "huggingface_hub_cache", PATH),
        (["--load-format", "safetensors"], "load_format", "auto"),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--served-model-name", "mine"], "served_model_name", ("mine",)),
        (["--served-model-name", "a", "b", "--port", "80"], "served_model_name", ("a", "b")),
        (["--api-key", "secret"], "api_key", "secret"),
        (["--trust-remote-code"], "trust_remote_code", True),
        (["--tensor-parallel-size=1", "--seed", "0", "--disable-log-requests"], "num_workers", 1),
        (["--enforce-eager"], "enforce_eager", True),
        (["--cuda-graphs", "0"], "enforce_eager", True),
        (["--cuda-graphs", "1,2,4,8,16,32"], "enforce_eager", False),
        (
            ["--enable-chunked-prefill", "--no-enable-prefix-caching", "--swap-space", "4", "--port", "80"],
            "port",
            80,
        ),
        (["--model", "org/model", "--tokenizer", "org/model"], "model_id", "org/model"),
        (["--logger-level", "WARNING"], "log_level", "warning"),
        (["-p", "8080", "-tp", "1"], "port", 8080),
        (["-e"], "port", 3000),
        (["--scheduling-policy", "priority"], "port", 3000),
        (["--enable-prefix-caching"], "prefix_caching", True),
        (["--no-enable-prefix-caching"], "prefix_caching", False),
        (["--cors-allow-origin", "a", "--cors-allow-origin", "b"], "cors_allow_origin", ("a", "b")),
        (["--response-ttl-s", "60"], "answer_ttl_s", 60.0),
        (["--max-dead-jobs", "7"], "max_dead", 7),
    ],
)
def test_flags_of_others_mean_ours(argv: list[str], name: str, value: Any) -> None:
    assert getattr(Settings.read(argv, {}), name) == value


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--seed", "7"], "SEED: 7 is not served: a seed belongs to a request"),
        (["--seed", "x"], "SEED: 'x' is not a whole number"),
        (["--max-model-len", "1"], "--max-model-len: 1 is less than 2"),
        (["--max-input-length", "5", "--max-input-tokens", "6"], "means the same as"),
        (
            ["--tensor-paralel-size", "2"],
            "--tensor-paralel-size: unknown flag; the nearest is --tensor-parallel-size",
        ),
        (["--validation-workers", "many"], "VALIDATION_WORKERS: 'many' is not a whole number"),
        (["--validation-workers", "0"], "VALIDATION_WORKERS: 0 is less than 1"),
        (["--rope-scaling", "linear"], "ROPE_SCALING: linear needs ROPE_FACTOR"),
        (["--demo"], "DEMO: "),
        (["--max-batches", "7"], "MAX_BATCHES: 7 is not served: it is the same for all fleets now"),
        (["--metrics-names", "vllm"], "METRICS_NAMES: vllm is not served: vLLM's names are recording rules"),
    ],
)
def test_what_is_refused_bears_the_name_that_the_person_said(argv: list[str], line: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read(argv, {})
    assert line in str(refusal.value)


def test_our_own_variable_wins_over_anothers_name_for_it() -> None:
    assert Settings.read([], {"THREADS": "3", "OMP_NUM_THREADS": "2"}).threads == 3
    assert Settings.read([], {"MODEL_ID": "ours", "HF_MODEL_ID": "theirs"}).model_id == "ours"
    assert Settings.read(["--max-input-length", "5"], {"MAX_INPUT_TOKENS": "6"}).max_input_tokens == 5


def test_vllms_names_are_no_variables() -> None:
    """A HOST or SEED in somebody's environment speaks to others."""
    assert (
        Settings.read([], {"HOST": "h", "SEED": "7", "TOKENIZER": "t", "MODEL": "m", "ENV": "production"})
        == Settings()
    )


def test_every_name_is_answered_once() -> None:
    fields, options = set(Settings.model_fields), set(OTHERS.options)
    assert not fields & options
    assert not (fields | options) & {*OTHERS.flags, *OTHERS.variables}
    meant = {*OTHERS.flags.values(), *OTHERS.variables.values(), *OTHERS.short.values()}
    assert meant <= fields | options
    rows = [*read_rows(TABLE.read_text(encoding="utf-8"))]
    names = [word.partition(":")[0] for row in rows for word in row.names.split()]
    assert len(names) == len({*names})
    assert {name for row in rows if row.answer == SAME for name in row.names.split()} <= fields
    assert any(option.accepts is ANY for option in OTHERS.options.values())
