"""LoRA adapters with random weights for tiny models, made and merged by PEFT; and rows with them on an
engine.

PEFT is imported where it is used: its import takes a tenth of the collection of all tests.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpu_worker.protocol import AdapterAnswer, SetAdapter
from tests.support.engine.tiny_engine import check_ids, prompts
from tests.support.engine.tiny_models import generate

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPREAD = 0.2


def save_adapter(model: Any, folder: Path, seed: int, **config: Any) -> Path:
    """Write an adapter for `model` whose matrices are random → its folder."""
    import peft

    torch.manual_seed(seed)
    values: dict[str, Any] = {"target_modules": LINEARS, "r": 4, "lora_alpha": 8} | config
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**values))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, SPREAD)
    adapted.save_pretrained(str(folder))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """The model with the adapter's weights added to its own, by PEFT."""
    import peft

    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)
    return loaded.merge_and_unload()


def adapted(model: Any, folder: Path) -> Any:
    """The model with the adapter beside it, as PEFT computes it: what is tied to an adapted layer stays."""
    import peft

    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)


def expected_ids(model: Any, folder: Path | None, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy ids of the model with an adapter merged into it; None: without."""
    own = merged(model, folder) if folder else model
    return [generate(own, prompt, count) for prompt in prompts]


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(folder: Path, **changes: Any) -> None:
    """Put other tensors in place of those whose names end so; None removes them."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for end, tensor in changes.items():
        for name in [name for name in tensors if name.endswith(end.replace("__", "."))]:
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor
    save_file(tensors, file)


# --- playing ------------------------------------------------------------------------------------------------

COUNT = 12


def load_adapters(engine: Any, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        assert engine.obey(SetAdapter(name, str(folder))) == AdapterAnswer(name)


def check_adapters(engine: Any, model: Any, folders: dict[str, Path], names: list[str]) -> None:
    """Rows of these adapters ("" is none) and every prompt have the ids that they should, however they are
    played.
    """
    fresh, expected, params = {}, {}, {}
    for number, name in enumerate(names):
        for place, ids in enumerate(expected_ids(model, folders.get(name), prompts(), COUNT)):
            row = 10 * number + place
            fresh[row], expected[row], params[row] = prompts()[place], ids, {"adapter": name}
    check_ids(engine, expected, fresh, params=params)
