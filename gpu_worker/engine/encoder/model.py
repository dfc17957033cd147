"""Encoder model: loads a model of BERT's family, and computes vectors or scores of whole sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from common import model_files
from common.messages.request import CLASSIFY
from common.pooling import CLS, LAST, MAX, OFFSET_POSITIONS, PoolingConfig
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.cpu.packed_linear import pack_linears
from gpu_worker.engine.encoder import packed_attention
from gpu_worker.engine.encoder.packed_attention import PackedAttention
from gpu_worker.engine.model.config import cannot_serve, quantization_of
from gpu_worker.engine.model.load import choose_device, choose_dtype, name_of, report_progress, threads_of
from gpu_worker.engine.model.weights import check_files
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.pooling.head import output_size, read_dense
from gpu_worker.protocol import UnservableModel

POOLER = "pooler."
"""Weights that an embedding model does without: its vectors are pooled otherwise."""


@dataclass(slots=True)
class EncoderModel:
    """An encoder on its device.

    Attributes:
        model, base: the whole model, and without its head.
        head: makes the vectors or scores of pooled states, [sequences, hidden] of the model's dtype.
        size: their values.
        first_position: number of a sequence's first position.
        has_types: whether tokens of a pair's second text have a type of their own.
    """

    tokenizer: Path
    model: Any
    base: Any
    head: nn.Module
    size: int
    pooling: PoolingConfig
    attention: PackedAttention
    device: torch.device
    dtype: torch.dtype
    first_position: int
    has_types: bool

    def move(self, device: torch.device) -> None:
        """Move the weights to a device."""
        self.model.to(device)
        self.head.to(device)

    @torch.inference_mode()
    def states(self, ids: torch.Tensor, lengths: Sequence[int], types: torch.Tensor) -> torch.Tensor:
        """ids int64 [tokens] of sequences that follow each other, and types int64 [tokens] of their tokens →
        last hidden states [tokens, hidden] of the model's dtype
        """
        self.attention.set_lengths(lengths)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        inputs = {"input_ids": ids[None], "position_ids": positions[None] + self.first_position}
        if self.has_types:
            inputs["token_type_ids"] = types[None]
        states: torch.Tensor = self.base(**inputs).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def pool(self, states: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """states [tokens, hidden] of sequences that follow each other → their vectors or scores, float32
        [sequences, size]
        """
        pooled = pool_states(states, lengths, self.pooling.method)
        vectors: torch.Tensor = self.head(pooled)
        return vectors.float()


def pool_states(states: torch.Tensor, lengths: Sequence[int], method: str) -> torch.Tensor:
    """states [tokens, hidden] → one for each sequence, [sequences, hidden] of the same dtype"""
    counts = torch.tensor(lengths, device=states.device)
    ends = counts.cumsum(0)
    parts = torch.split(states, [*lengths])
    if method == CLS:
        return states[ends - counts]
    if method == LAST:
        return states[ends - 1]
    if method == MAX:
        return torch.stack([part.amax(0) for part in parts])
    return torch.stack([part.float().mean(0) for part in parts]).to(states.dtype)


@torch.inference_mode()
def load_encoder(
    settings: Settings,
    path: Path,
    pooling: PoolingConfig,
    progress: model_files.Progress,
    communicator: Communicator,
) -> EncoderModel:
    """Load an encoder. Raises SettingError if the settings cannot be served."""
    if communicator.world_size > 1:
        cause = "an encoder is computed by one rank; NUM_WORKERS starts several of them"
        raise SettingError("num_shard", f"{communicator.world_size} ranks, but {cause}")
    device = choose_device(settings.device, communicator.info)
    dtype = encoder_dtype(settings, device)
    torch.set_num_threads(settings.threads or threads_of(settings, communicator))
    report_progress(progress)
    progress(f"loading {settings.model_name} as {name_of(dtype)} on {device.type}")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        check_config(config, settings)
        model = read_encoder(path, config, pooling, settings, dtype)
        head, size = make_head(model, config, pooling, dtype)
        head.to(device)
    except (UnservableModel, ValueError, OSError, KeyError) as error:
        raise cannot_serve(settings.model_id, error) from error
    model.eval()
    if device.type == "cpu":
        pack_linears(model, {})
    model.to(device)
    attention = PackedAttention()
    packed_attention.register(attention)
    offset = config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
    return EncoderModel(
        tokenizer=model_files.find_tokenizer(settings.tokenizer_name, path),
        model=model,
        base=model.base_model,
        head=head,
        size=size,
        pooling=pooling,
        attention=attention,
        device=device,
        dtype=dtype,
        first_position=offset,
        has_types=getattr(config, "type_vocab_size", 0) > 1 and config.model_type != "modernbert",
    )


def encoder_dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """`auto` is float32 on CPU, since vectors are compared with those of an index that others have made."""
    if settings.dtype == "auto" and device.type == "cpu":
        return torch.float32
    return choose_dtype(settings.dtype, device)


def check_config(config: Any, settings: Settings) -> None:
    """Raises SettingError for an encoder that is not served."""
    cause = ""
    if quantization_of(config) is not None:
        cause = "is quantised; encoders are served with plain weights"
    elif getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        cause = "is used as a decoder"
    elif getattr(config, "position_embedding_type", "absolute") not in ("absolute", None):
        cause = f"has positions of type {config.position_embedding_type}; only absolute ones are served"
    if cause:
        raise SettingError("model_id", f"{settings.model_id} ({config.model_type}) {cause}")
    if settings.quantize is not None:
        raise SettingError("quantize", f"{settings.quantize} is not served for encoders")


def read_encoder(
    path: Path, config: Any, pooling: PoolingConfig, settings: Settings, dtype: torch.dtype
) -> Any:
    """The model on the CPU. Raises SettingError where weights are missing."""
    kind: Any = AutoModelForSequenceClassification if pooling.kind == CLASSIFY else AutoModel
    options = {"attn_implementation": packed_attention.NAME, "trust_remote_code": settings.trust_remote_code}
    packed_attention.register(PackedAttention())
    if settings.makes_weights:
        torch.manual_seed(0)
        return kind.from_config(config, **options).to(dtype)
    check_files(path, settings.model_id, is_plain=True)
    model, info = kind.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **options)
    lost = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
    needs_pooler = pooling.kind == CLASSIFY
    if missing := sorted(name for name in lost if needs_pooler or not name.startswith(POOLER)):
        raise SettingError("model_id", f"{settings.model_id} has no weights for {', '.join(missing[:3])}")
    return model


# --- heads --------------------------------------------------------------------------------------------------


class ClassifierHead(nn.Module):
    """The head of transformers' model for sequence classification, after its own pooling."""

    def __init__(self, model: Any, model_type: str) -> None:
        super().__init__()
        self.model = model
        self.score = SCORES[model_type]

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """pooled [sequences, hidden] → scores [sequences, labels], both of the model's dtype"""
        return self.score(self.model, pooled)


def score_by_pooler(model: Any, pooled: torch.Tensor) -> torch.Tensor:
    """pooled [sequences, hidden] → scores [sequences, labels] of one dtype; its pooler takes a sequence"""
    return model.classifier(model.bert.pooler(pooled[:, None]))  # type: ignore[no-any-return]


def score_by_head(model: Any, pooled: torch.Tensor) -> torch.Tensor:
    """pooled [sequences, hidden] → scores [sequences, labels] of one dtype; its head takes a sequence"""
    return model.classifier(pooled[:, None])  # type: ignore[no-any-return]


def score_by_layers(model: Any, pooled: torch.Tensor) -> torch.Tensor:
    """pooled [sequences, hidden] → scores [sequences, labels] of one dtype"""
    return model.classifier(model.pre_classifier(pooled).relu())  # type: ignore[no-any-return]


def score_by_prediction(model: Any, pooled: torch.Tensor) -> torch.Tensor:
    """pooled [sequences, hidden] → scores [sequences, labels] of one dtype"""
    return model.classifier(model.head(pooled))  # type: ignore[no-any-return]


SCORES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "bert": score_by_pooler,
    "roberta": score_by_head,
    "xlm-roberta": score_by_head,
    "camembert": score_by_head,
    "distilbert": score_by_layers,
    "modernbert": score_by_prediction,
}
"""By the type of a model: pooled states → scores."""


def make_head(model: Any, config: Any, pooling: PoolingConfig, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """The head, and the values that come out of it. Raises UnservableModel."""
    if pooling.kind == CLASSIFY:
        return ClassifierHead(model, config.model_type), int(config.num_labels)
    layers = read_dense(pooling.dense)
    hidden_size = getattr(config, "hidden_size", None) or config.dim
    return layers.to(dtype), output_size(layers, hidden_size)
