"""A small GGUF file, as llama.cpp writes them."""

from pathlib import Path
from random import Random

import gguf
import numpy as np

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, VOCAB = 2, 64, 128, 4, 2, 500
KV_SIZE = HIDDEN // HEADS * KV_HEADS
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_SIZE, HIDDEN),
    "attn_v": (KV_SIZE, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
TYPES = gguf.GGMLQuantizationType


def write(path: Path, *types: TYPES) -> Path:
    """A random Llama with a tokenizer of bytes; its matrices are of these types in turn, its norms float32,
    as llama.cpp writes them.
    """
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "ba", *(f"<{number}>" for number in range(4, VOCAB))])
    writer.add_token_merges(["a b", "b a"])
    for name in ("bos", "eos", "unk"):
        getattr(writer, f"add_{name}_token_id")(1)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in MATRICES.items()}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = types[number % len(types)]
        matrix = gguf.quants.quantize(random.normal(0, 0.25, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", matrix, raw_dtype=kind)
    for name in (
        "output_norm",
        *(f"blk.{layer}.{norm}" for layer in range(LAYERS) for norm in ("attn_norm", "ffn_norm")),
    ):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def damage(content: bytes, draw: Random) -> bytes:
    """A file that is cut, or has another byte or number somewhere in its header."""
    damaged, end = bytearray(content), content.index(b"output_norm.weight") + 60
    if draw.random() < 0.15:
        return content[: draw.randrange(len(content))]
    near = draw.choice([(0, 700), (end - 2500, end), (0, end)])
    at = draw.randrange(*near)
    if draw.random() < 0.1:
        number = draw.choice([0, 10**6, 2**40, 2**64 - 1])
        damaged[at : at + 8] = number.to_bytes(8, "little")
    else:
        damaged[at] ^= draw.choice([1 << draw.randrange(8), draw.randrange(1, 256)])
    return bytes(damaged)
