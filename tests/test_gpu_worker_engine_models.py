"""Other decoders than Llama, tiny and random: served with the ids of `generate`, or refused with the cause."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from tests.batch_player import Player

SIZES = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
LLAMA = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}
OTHER_NAMES = {"vocab_size": 500, "n_layer": 2, "n_head": 4}
NEW_TOKENS = 12

SERVED = {
    "Llama": LLAMA,
    "Qwen3": LLAMA | {"head_dim": 32},
    "Granite": LLAMA | {"logits_scaling": 4.0, "attention_multiplier": 0.3},
    "Mixtral": LLAMA | {"num_local_experts": 4, "sliding_window": None},
    "GPT2": OTHER_NAMES | {"n_embd": 64, "n_positions": 256},
    "GPTNeoX": SIZES | {"intermediate_size": 128},
}
REFUSED = {
    "Bloom": (OTHER_NAMES | {"hidden_size": 64}, "cannot be replaced"),
    "Mpt": ({"vocab_size": 500, "d_model": 64, "n_layers": 2, "n_heads": 4}, "cannot be replaced"),
    "Falcon": (SIZES | {"alibi": True}, "ALiBi"),
    "Mistral": (LLAMA | {"sliding_window": 32}, "its attention needs sliding_window"),
    "DeepseekV3": (LLAMA | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}, "not of the shape"),
    "Mamba": ({"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2}, "no attention heads"),
    "T5": ({"vocab_size": 500, "d_model": 64, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
}


def save(folder: Path, family: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # wider apart, so that the ids vary
            weight.mul_(3 if weight.dim() > 1 else 1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    return model


def engine_of(folder: Path) -> Engine:
    return Engine(Settings(model_id=str(folder), dtype="float32", kv_cache_bytes=2**22, max_batch_prefill_tokens=64))


@pytest.mark.parametrize("family", SERVED)
def test_served(family: str, tmp_path: Path) -> None:
    model = save(tmp_path, family, SERVED[family])
    engine = engine_of(tmp_path)
    prompts = [torch.randint(3, 500, (length,)).tolist() for length in (1, 20, 50)]
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), prefill_tokens=16)
    ids = played.run([played.start(row, prompt, NEW_TOKENS, ignore_eos=True) for row, prompt in enumerate(prompts)])
    for row, prompt in enumerate(prompts):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert ids[row] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", REFUSED)
def test_refused(family: str, tmp_path: Path) -> None:
    sizes, words = REFUSED[family]
    save(tmp_path, family, sizes)
    with pytest.raises(SettingError, match=words) as caught:
        engine_of(tmp_path)
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)
