"""Tiny encoders with random weights, a tokenizer of BERT's kind, and the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.prompts import PROMPTS

MAX_TOKENS = 60
SIZES = {
    "vocab_size": 500,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", SIZES),
    "RoBERTa": ("Roberta", SIZES | {"type_vocab_size": 1, "pad_token_id": 1}),
    "XLM-RoBERTa": ("XLMRoberta", SIZES | {"type_vocab_size": 1, "pad_token_id": 1}),
    "DistilBERT": (
        "DistilBert",
        SIZES | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "ModernBERT": ("ModernBert", SIZES | {"local_attention": 16, "global_attn_every_n_layers": 2}),
}
"""By name: the beginning of transformers' classes, and the sizes."""


def save_encoder(folder: Path, name: str, num_labels: int = 0, **config: Any) -> Any:
    """Make an encoder and save it → the model; with `num_labels` a classifier."""
    family, sizes = ENCODERS[name]
    torch.manual_seed(7)
    labels = {"num_labels": num_labels} if num_labels else {}
    made = getattr(transformers, f"{family}Config")(**(sizes | labels | config))
    kind = "ForSequenceClassification" if num_labels else "Model"
    model = getattr(transformers, family + kind)(made).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of words' parts that puts [CLS] and [SEP] around a text, and types on a pair."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=480, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(PROMPTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(text, special.index(text)) for text in ("[CLS]", "[SEP]")],
    )
    tokenizer.enable_truncation(8)  # as in real files, where servers must turn it off
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": MAX_TOKENS}))


def save_modules(folder: Path, mode: str = "pooling_mode_mean_tokens", dense: bool = False) -> None:
    """The files of sentence-transformers beside a model."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, mode: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense:
        save_dense(folder / "2_Dense")


def save_dense(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(3)
    save_file(
        {"linear.weight": torch.randn(24, 32), "linear.bias": torch.randn(24)}, folder / "model.safetensors"
    )
    config = {
        "in_features": 32,
        "out_features": 24,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "config.json").write_text(json.dumps(config))
