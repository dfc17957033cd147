"""Adapters of an engine without a model: what the engine answers to the agent's frames."""

import json
from pathlib import Path

from gpu_worker.engine.batch.adapters import Adapter
from gpu_worker.protocol import (
    AdapterAnswer,
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)

MAX_LORAS, MAX_LORA_RANK, MAX_CPU_LORAS = 4, 64, 16


class ScriptedAdapters:
    """Adapters by name. A folder without an `adapter_config.json` is refused, and so is a rank that is too
    large.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Adapter] = {}

    def obey(self, command: LoadAdapter | UnloadAdapter) -> AdapterAnswer:
        if isinstance(command, UnloadAdapter):
            self.loaded.pop(command.name, None)
            return AdapterUnloaded(command.name)
        path = Path(command.path)
        try:
            rank = json.loads((path / "adapter_config.json").read_text())["r"]
        except FileNotFoundError:
            return AdapterRefused(command.name, f"{path} has no adapter_config.json")
        if rank > MAX_LORA_RANK:
            return AdapterRefused(command.name, f"its rank is {rank}; MAX_LORA_RANK is {MAX_LORA_RANK}")
        self.loaded[command.name] = Adapter(command.name)
        return AdapterLoaded(command.name, rank, 1024 * rank)
