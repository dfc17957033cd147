"""Pictures in requests to a gateway, and processors of pictures with a tiny tokenizer."""

import base64
import io
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import transformers
from PIL import Image

from api.app import Gateway
from api.prompts.tokenizer import ModelTokenizer
from common.messages.request import Generate
from common.pictures import Size
from common.settings.settings import Settings
from tests.support.engine.tiny_tokenizers import SPECIAL, byte_tokenizer
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer, FakeWorker


def png(size: Size = (20, 30), color: str = "red") -> bytes:
    """The file of a picture of one colour."""
    target = io.BytesIO()
    Image.new("RGB", (size[1], size[0]), color).save(target, "PNG")
    return target.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*content: str | dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat: one of the user, whose parts are texts or pictures."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return [{"role": "user", "content": parts}]


def showing(
    url: str, folder: Path, answer: Answer | Callable[[Generate], Answer], sees: bool = True, **settings: Any
) -> AbstractAsyncContextManager[tuple[FakeWorker, Gateway, httpx.AsyncClient]]:
    """A worker that gives this answer, and a gateway with the tokenizer in a folder."""
    tokenizer = ModelTokenizer(Settings(model_id=str(folder), **settings))
    return answering(url, answer, tokenizer=tokenizer, sees=sees, **settings)


# --- processors ---------------------------------------------------------------------------------------------

TOKENS: dict[str, dict[str, str]] = {
    "idefics3": {"image_token": "<image>"},
    "qwen2_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "llava_onevision": {"image_token": "<image>", "video_token": "<video>"},
    "internvl": {
        "image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}
MORE_TOKENS = {
    "idefics3": ["<fake_token_around_image>", "<global-img>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
    "qwen2_vl": ["<|vision_start|>", "<|vision_end|>"],
}
GRID = [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]

SMALL = {"size": {"height": 28, "width": 28}}
CLASSES = {
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessorPil"),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessorPil"),
    "llava_onevision": ("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessorPil"),
    "internvl": ("InternVLProcessor", "GotOcr2ImageProcessorPil"),
    "gemma3": ("Gemma3Processor", "Gemma3ImageProcessorPil"),
}
"""Names of processor and image processor."""
IMAGES: dict[str, dict[str, Any]] = {
    "idefics3": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}},
    "qwen2_vl": {"patch_size": 7, "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}},
    "llava_onevision": {**SMALL, "image_grid_pinpoints": GRID},
    "internvl": {**SMALL, "max_patches": 6},
    "gemma3": SMALL,
}
"""Options of image processors."""
OWN: dict[str, dict[str, Any]] = {
    "idefics3": {"image_seq_len": 4},
    "qwen2_vl": {},
    "llava_onevision": {
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_2",
    },
    "internvl": {"image_seq_length": 4},
    "gemma3": {"image_seq_length": 16},
}
"""Options of processors."""


CHAT_TEMPLATES = {
    "idefics3": """<|im_start|>{% for m in messages %}{{ m.role | capitalize }}:{% for line in m.content %}
{%- if line.type == 'text' %}{{ line.text }}{% elif line.type == 'image' %}<image>{% endif %}
{%- endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}""",
    "qwen2_vl": """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
}
"""Shaped as those of the families' checkpoints: the first takes parts only."""


def tokenizer_for(family: str) -> Any:
    """A tokenizer of bytes with a family's tokens, which have names as they have in its checkpoints; its ids
    are below 500.
    """
    texts = [*TOKENS[family].values(), *MORE_TOKENS.get(family, [])]
    begin, end = SPECIAL
    make: Any = transformers.PreTrainedTokenizerFast  # untyped
    tokenizer = make(
        tokenizer_object=byte_tokenizer(),
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=list(dict.fromkeys(texts)),
    )
    tokenizer._set_model_specific_special_tokens(TOKENS[family])
    return tokenizer


def make_processor(family: str, folder: Path, **options: Any) -> Any:
    """A family's processor; its files are in `folder` then, and a config with the placeholder's id unless
    there is one.

    Args:
        options: of the image processor, in place of those of a small model.
    """
    processor_name, images_name = CLASSES[family]
    images = getattr(transformers, images_name)(**IMAGES[family] | options)
    tokenizer = tokenizer_for(family)
    processor = without_video(processor_name)(images, tokenizer, **OWN[family])
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(OWN[family]))
    placeholder = tokenizer.convert_tokens_to_ids(TOKENS[family]["image_token"])
    config = {"model_type": family, "image_token_id": placeholder}
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config))
    if family in CHAT_TEMPLATES:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATES[family])
    return processor


def without_video(name: str) -> Any:
    """A kind of processors without their part for videos: transformers' own ones need torchvision."""
    parent = getattr(transformers, name)

    def create(self: Any, images: Any, tokenizer: Any, **options: Any) -> None:
        videos = {"video_processor": None} if "video_processor" in parent.get_attributes() else {}
        parent.__init__(self, image_processor=images, tokenizer=tokenizer, **videos, **options)

    def check(self: Any, kind: str, argument: Any) -> Any:
        return None if argument is None else parent.check_argument_for_proper_class(self, kind, argument)

    get_attributes = classmethod(lambda cls: parent.get_attributes())
    members = {"__init__": create, "check_argument_for_proper_class": check, "get_attributes": get_attributes}
    return type(name, (parent,), members)


def processed_ids(processor: Any, text: str, sizes: Sequence[Size]) -> list[int]:
    """Ids of a prompt with pictures of these sizes, as transformers has them."""
    images = [Image.new("RGB", (width, height)) for height, width in sizes]
    found = processor(images=[images], text=[text])["input_ids"]
    return [int(token_id) for token_id in found[0]]
