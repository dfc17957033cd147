"""Prompts from messages, compared with what transformers makes of the same template.
Control texts that a client wrote are text: guards change nothing of what a template renders, and the
plain copy gives the ids of the original.

A bounded number of bytes is tokenized at once, in order; the bound on a text holds for every text.
"""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from api.errors import ApiError
from api.prompts.chat_template import (
    GUARDS,
    ChatTemplate,
    ControlTexts,
    PlainCopy,
    Rendered,
    rendered_text,
)
from api.prompts.tokenizer import SHORT_BYTES, ModelTokenizer, TextBudget, takes_grammars
from common import model_files
from common.settings.settings import SettingError, Settings
from tests.support.tokenizer import IM_END, TOKENIZER, model_tokenizer
from tests.support.waiting import wait_until

CHAT = [
    {"role": "system", "content": "  Be <brief> & kind.\n"},
    {"role": "user", "content": "Hé 🙂\n\n\tHow are you? "},
    {"role": "assistant", "content": " Fine.\n"},
    {"role": "user", "content": "{{ 1 + 1 }} <|im_end|>", "name": "Ann"},
]
TEMPLATE_FILES = {
    "chatml": "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trims": "{{ bos_token }}\n{% for m in messages %}\n"
    "    {% if m['role'] == 'system' %}\nSYS {{ m['content'] | trim }}\n"
    "    {% elif m['role'] == 'user' %}\n[INST] {{ m['content'] | trim }} [/INST]\n    {% else %}\n"
    "{{ m['content'] | trim }}{{ eos_token }}\n    {% endif %}\n{% endfor %}",
    "blocks": "{%- set ns = namespace(n=0, last='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% generation %}{{ ns.n }}: {{ m | tojson(indent=1) }}"
    "{{ [m.content] | tojson }}{% endgeneration %}"
    "{% if ns.n > 2 %}{% break %}{% endif %}{% endfor %}"
    "{{ dict(a=1).items() | list }}{{ tools is none }}{{ nothing }}",
    "given": "{{ style | upper }}{% if thinking is defined and thinking %} thinks{% endif %}"
    "{{ messages | length }}"
    "{{ strftime_now('%Y') }}",
}
VARIABLES = {"style": "loud", "thinking": True}


@pytest.fixture(scope="module")
def path() -> Path:
    return model_files.resolve("smollm2")


@pytest.fixture(scope="module")
def template_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", ["the model's own", *TEMPLATE_FILES])
def test_rendered_prompts_are_those_of_transformers(
    path: Path, template_tokenizer: Any, name: str, add_generation_prompt: bool
) -> None:
    own = ChatTemplate.load(path)
    assert own is not None
    template = ChatTemplate(TEMPLATE_FILES[name], own.special_tokens) if name in TEMPLATE_FILES else own
    for chat in (CHAT, CHAT[1:3], CHAT[3:]):
        variables = {"add_generation_prompt": add_generation_prompt, **VARIABLES}
        theirs = template_tokenizer.apply_chat_template(
            chat, chat_template=TEMPLATE_FILES.get(name), tokenize=False, **variables
        )
        ids = template_tokenizer.apply_chat_template(
            chat, chat_template=TEMPLATE_FILES.get(name), return_dict=False, **variables
        )
        ours = template.render(chat, add_generation_prompt, VARIABLES)
        assert ours == theirs
        assert model_tokenizer().encode(ours, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", ["the model's own", "chatml", "trims"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " a\n", "CONTINUE"])
def test_a_last_message_is_continued_as_transformers_does(
    path: Path, template_tokenizer: Any, name: str, content: str
) -> None:
    own = ChatTemplate.load(path)
    assert own is not None
    template = ChatTemplate(TEMPLATE_FILES[name], own.special_tokens) if name in TEMPLATE_FILES else own
    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    theirs = template_tokenizer.apply_chat_template(
        chat, chat_template=TEMPLATE_FILES.get(name), tokenize=False, continue_final_message=True
    )
    assert template.render_open(chat, {}) == theirs
    assert theirs.endswith(content.strip() if name == "trims" else content)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "xpected"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ dict.__class__.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_errors_of_a_template_are_422(source: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        ChatTemplate(source, {}).render(CHAT, True, {})
    assert (caught.value.status, caught.value.error_type, caught.value.param) == (
        422,
        "template_error",
        "messages",
    )


def test_files_that_hold_the_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    eos = {"content": "</s>", "lstrip": False}
    write(
        tmp_path,
        "tokenizer_config.json",
        {"chat_template": "config{{ bos_token }}{{ eos_token }}", "bos_token": "<s>", "eos_token": eos},
    )
    assert rendered(tmp_path) == "config<s></s>"
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "of several"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    assert rendered(tmp_path) == "of several"
    write(tmp_path, "chat_template.json", {"chat_template": "of a processor"})
    assert rendered(tmp_path) == "of a processor"
    (tmp_path / "chat_template.jinja").write_text("of its own file é")
    assert rendered(tmp_path) == "of its own file é"


@pytest.mark.parametrize(
    ("source", "cause"), [("{% for", "is no chat template: "), (None, "is no chat template: .*No such file")]
)
def test_a_file_that_is_no_template_is_refused(source: str | None, cause: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    if source is not None:
        file.write_text(source)
    with pytest.raises(SettingError, match=f"^CHAT_TEMPLATE: {file} {cause}"):
        ChatTemplate.load(tmp_path, None, str(file))


LLAMA = (
    "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
)
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m['tool_calls'] %}{{ '```json\n' + c['function']['arguments'] + '```' }}"
    "{% endfor %}{% endfor %}"
)
PYTHONIC = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
    "{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    ("source", "takes_tools", "wants_text"),
    [(LLAMA, True, False), (HERMES, True, False), (DEEPSEEK, False, True), (PYTHONIC, True, True)],
)
def test_what_a_template_does_with_tools_is_read_from_it(
    source: str, takes_tools: bool, wants_text: bool
) -> None:
    template = ChatTemplate(source, {})
    assert (template.takes_tools, template.wants_text_arguments) == (takes_tools, wants_text)


@pytest.mark.parametrize("is_file", [False, True])
def test_requests_with_tools_have_a_template_of_their_own(tmp_path: Path, is_file: bool) -> None:
    """In the tokenizer's config, or where transformers saves templates that have a name."""
    if is_file:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
        (tmp_path / "chat_template.jinja").write_text("plain")
    else:
        several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}"}]
        write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render(CHAT, True, {}) == "plain"
    assert template.for_tools.render(CHAT, True, {}, [{"a": 1}]) == "[{'a': 1}]"


def write(path: Path, name: str, content: object) -> None:
    (path / name).write_text(json.dumps(content))


def rendered(path: Path) -> str:
    template = ChatTemplate.load(path)
    assert template is not None
    return template.render(CHAT, True, {})


# --- control texts ------------------------------------------------------------------------------------------

TEXTS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[[INST]]", "!"]
CONTROLS = ControlTexts(TEXTS)
PIECES = [
    *TEXTS,
    "<|im_",
    "end|>",
    "<|",
    "|>",
    "<",
    ">",
    "s>",
    "[",
    "INST]",
    " ",
    "\n",
    "a",
    "é🙂",
    '"',
    "\\",
    GUARDS[0],
]
CONTENT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
OWN = model_tokenizer().chat_template
assert OWN is not None
TEMPLATES = {
    "the model's own": OWN,
    "trims": ChatTemplate("{% for m in messages %}[INST]{{ m.content | trim }}</s>{% endfor %}", {}),
    "JSON": ChatTemplate("<s>{{ messages | tojson }}{{ messages | tojson(ensure_ascii=True) }}", {}),
    "Python": ChatTemplate("<s>{{ messages }}{{ messages[0].content | upper | replace('A', 'b') }}", {}),
    "joins": ChatTemplate("<s>{% for m in messages %}{{ m.content }}{% endfor %}</s>", {}),
    "of parts": ChatTemplate("{{ '<|im_' + 'start|>' }}{{ messages[0].content }}{{ '<' + '/s>' }}", {}),
}


def texts(template: ChatTemplate, contents: list[str], controls: ControlTexts = CONTROLS) -> tuple[str, str]:
    """What the template renders, and the same with guards if something needs them."""
    messages: Any = [{"role": "user", "content": content} for content in contents]
    guard = controls.guard_for(messages, template.source)
    found = rendered_text(
        template.render(controls.guarded(messages, guard) if guard else messages, False, {}), guard
    )
    return found.text, found.guarded


@pytest.mark.parametrize("name", TEMPLATES)
@given(contents=st.lists(CONTENT, min_size=1, max_size=3))
def test_a_prompt_is_the_same_and_only_the_template_s_control_texts_are_whole(
    name: str, contents: list[str]
) -> None:
    template = TEMPLATES[name]
    messages: Any = [{"role": "user", "content": content} for content in contents]
    text, guarded = texts(template, contents)
    guard = CONTROLS.guard_for(contents, template.source)
    assert text == template.render(messages, False, {})
    for control in TEXTS:
        own = template.render([{**one, "content": "b"} for one in messages], False, {}).count(control)
        assert guarded.count(control) - guarded.count(f"!{guard}") * (control == "!") == own, control


def test_the_guard_is_in_no_text_and_in_no_template() -> None:
    assert CONTROLS.guard_for(["<s>", GUARDS[0]], f"{GUARDS[1]} \\ue002") == GUARDS[3]
    assert CONTROLS.guard_for(["<s>", "\\ue000"], "") == GUARDS[1]
    with pytest.raises(ApiError, match="private-use"):
        CONTROLS.guard_for(["<s>", "".join(GUARDS)], "")
    assert ControlTexts().guard_for(["<s>"], "") is CONTROLS.guard_for(["a"], "") is None
    assert ControlTexts(guards_all=True).guard_for(["a"], "") == GUARDS[0]


# --- control texts plain copy -------------------------------------------------------------------------------

GUARD = "\ue000"
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
LETTERS = sorted({*"▁abcdefgins<|>[]/ACLS\n é"})


def tokenizer(*added: AddedToken, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(["?", *LETTERS, "▁a", "ab", "</", "s>"])}
    merges = [("▁", "a"), ("a", "b"), ("<", "/"), ("s", ">")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="?"))
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*added])
    made.add_tokens([AddedToken("<a>", normalized=False)])
    first = made.token_to_id(added[0].content)
    assert first is not None
    made.post_processor = processors.TemplateProcessing(
        single=f"{added[0].content} $A {added[0].content}", special_tokens=[(added[0].content, first)]
    )
    return made


def both(**flags: Any) -> tuple[AddedToken, AddedToken]:
    return AddedToken("<s>", **flags), AddedToken("</s>", **flags)


def unigram() -> Tokenizer:
    """A model that knows its control tokens as pieces of texts, and the likeliest ones."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in LETTERS)]
    made = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    made.add_special_tokens([*both(normalized=False), AddedToken("<unk>", normalized=False)])
    return made


def words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "ab": 3, "c": 4}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken("</s>", normalized=False), AddedToken("<unk>", normalized=False)])
    return made


METASPACE = pre_tokenizers.Metaspace(prepend_scheme="first")
TOKENIZERS = {
    "bundled": TOKENIZER,
    "plain": tokenizer(*both(normalized=False)),
    "takes spaces before": tokenizer(*both(normalized=False, lstrip=True)),
    "takes spaces after it": tokenizer(*both(normalized=False, rstrip=True)),
    "whole words": tokenizer(*both(normalized=False, single_word=True)),
    "prepends": tokenizer(*both(normalized=False), normalizer=PREPENDED),
    "prepends to normalized": tokenizer(*both(normalized=True), normalizer=PREPENDED),
    "prepends first": tokenizer(*both(normalized=False), splitter=METASPACE),
    "composes": tokenizer(*both(normalized=True, rstrip=True), normalizer=normalizers.NFKC()),
    "knows them as pieces": unigram(),
    "knows them as words": words(),
    "lowers": tokenizer(*both(normalized=True), normalizer=normalizers.Lowercase()),
}
COPIES = {name: PlainCopy(one) for name, one in TOKENIZERS.items()}
SPECIAL = {name: "<|im_end|>" if one is TOKENIZER else "</s>" for name, one in TOKENIZERS.items()}
WORDS = ["a", "ab", " ", "  ", "\n", "é", "c", "<", "s>", "</", "<a>", "e\u0301", "A"]
ORDINARY = (
    st.lists(st.sampled_from(WORDS), max_size=5)
    .map("".join)
    .filter(lambda text: "<s>" not in text and "</s>" not in text)
)


def ids(name: str, guarded: str, add_special_tokens: bool = False) -> list[int]:
    found: list[int] = COPIES[name].encode(Rendered(guarded, GUARD), add_special_tokens).ids
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(parts=st.lists(ORDINARY, min_size=1, max_size=4), add_special_tokens=st.booleans())
def test_ids_of_ordinary_texts_are_the_same(name: str, parts: list[str], add_special_tokens: bool) -> None:
    """With a template's control tokens between them."""
    text = SPECIAL[name].join(parts)
    expected = TOKENIZERS[name].encode(text, add_special_tokens=add_special_tokens).ids
    assert ids(name, text, add_special_tokens) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(before=ORDINARY, after=ORDINARY)
def test_a_client_s_control_text_is_text_and_the_template_s_stays_a_token(
    name: str, before: str, after: str
) -> None:
    special = SPECIAL[name]
    special_id = TOKENIZERS[name].token_to_id(special)
    assert special_id is not None
    written = f"{before}{special[0]}{GUARD}{special[1:]}{after}"
    assert ids(name, written).count(special_id) == 0
    around = ids(name, f"a {special} {written} {special} a")
    assert around.count(special_id) == ids(name, f"a {special} {before}c{after} {special} a").count(
        special_id
    )


def test_a_client_cannot_write_an_alias() -> None:
    copy = COPIES["bundled"]
    with pytest.raises(ApiError, match="private-use"):
        copy.aliased(Rendered(f"a{copy.aliases[IM_END]}", GUARD))
    assert len({*copy.aliases.values()}) == len(copy.aliases) == 17


# --- tokenizer ----------------------------------------------------------------------------------------------


class Works:
    """Works that end when they are told to."""

    def __init__(self, num_threads: int = 8) -> None:
        self.budget = TextBudget(num_threads)
        self.running: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.tasks: dict[str, asyncio.Task[str]] = {}

    def start(self, name: str, size: int) -> None:
        self.ends[name] = threading.Event()
        self.tasks[name] = asyncio.create_task(self.budget.run(size, lambda: self.work(name)))

    def work(self, name: str) -> str:
        self.running.append(name)
        assert self.ends[name].wait(30)
        self.running.remove(name)
        return name

    async def end(self, name: str) -> str:
        self.ends[name].set()
        return await self.tasks[name]

    async def until(self, *names: str) -> None:
        await wait_until(lambda: sorted(self.running) == sorted(names))


@pytest.fixture
async def works() -> AsyncIterator[Works]:
    works = Works()
    yield works
    for end in works.ends.values():
        end.set()
    await asyncio.gather(*works.tasks.values(), return_exceptions=True)


LONG = 2 * SHORT_BYTES


@pytest.mark.parametrize(
    ("num_threads", "names"), [(1, ("long",)), (2, ("long", "a")), (3, ("long", "next", "a"))]
)
async def test_validation_workers_bound_the_threads(num_threads: int, names: tuple[str, ...]) -> None:
    """One thread is left to short texts, if there are several."""
    works = Works(num_threads)
    for name, size in (("long", LONG), ("next", LONG), ("a", SHORT_BYTES), ("b", SHORT_BYTES)):
        works.start(name, size)
    await works.until(*names)
    for end in works.ends.values():
        end.set()
    assert await asyncio.gather(*works.tasks.values()) == list(works.tasks)
    assert len(works.budget.threads._threads) <= num_threads


async def test_a_caller_that_leaves_gives_its_room_back_when_its_work_has_ended(works: Works) -> None:
    for name in ("other", "a", "waiting", "b"):
        works.start(name, LONG)
    await works.until("other", "a")
    works.tasks["waiting"].cancel()
    works.tasks["a"].cancel()
    await asyncio.gather(works.tasks["a"], works.tasks["waiting"], return_exceptions=True)
    assert sorted(works.running) == ["a", "other"] and works.budget.long.locked()
    works.ends["a"].set()
    await works.until("other", "b")


# --- far too long ------------------------------------------------------------------------------------------

MANY_WORDS = {"a": 0, "b": 1, "ab": 2, "▁": 3, "▁a": 4, "é": 5, "<0x00>": 6}
BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"aa": 256}


def bpe(vocabulary: dict[str, int] = MANY_WORDS, **options: Any) -> Tokenizer:
    merges = [("a", "b"), ("▁", "a")] if vocabulary is MANY_WORDS else [("a", "a")]
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def composed(tokenizer: Tokenizer, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    return tokenizer


def with_token(token: AddedToken) -> Tokenizer:
    tokenizer = bpe(BYTES)
    tokenizer.add_special_tokens([token])
    return tokenizer


SPACE_PREPENDED = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
CUT = [
    TOKENIZER,
    composed(bpe(BYTES), normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    composed(
        bpe(BYTES), None, pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    ),
    composed(bpe(unk_token="é", fuse_unk=True), normalizers.Sequence(SPACE_PREPENDED)),
    composed(bpe(), None, pre_tokenizers.ByteLevel()),
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    composed(bpe(unk_token="é"), normalizers.Strip(), pre_tokenizers.Whitespace()),
    composed(bpe(unk_token="é"), normalizers.Replace(Regex("a+"), "a")),
    with_token(AddedToken("<s>", rstrip=True)),
]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 500}, 500),
        ({"vocab_size": 500, "text_config": {"vocab_size": 400}}, 400),
        ({"vocab_size": 500, "text_config": {}}, 500),
        ({"text_config": {"hidden_size": 8}}, sys.maxsize),
    ],
)
def test_prompts_may_have_the_ids_that_the_model_s_config_says(
    config: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    bpe().save(str(tmp_path / "tokenizer.json"))
    assert ModelTokenizer(Settings(model_id=str(tmp_path))).num_embedded == expected


@pytest.mark.parametrize(
    ("decoder", "takes"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
        (decoders.Metaspace(), False),
        (decoders.WordPiece(), False),
        (decoders.BPEDecoder(), False),
        (None, False),
    ],
    ids=str,
)
def test_grammars_need_tokens_of_bytes(decoder: Any, takes: bool) -> None:
    tokenizer = bpe()
    if decoder:
        tokenizer.decoder = decoder
    assert takes_grammars(tokenizer) == takes


@pytest.mark.parametrize("tokenizer", CUT)
@given(text=st.text() | st.text("ạ̈ \n1é<|im_end>\x04") | st.text("ᾧ̓͂ͅ가각"), data=st.data())
def test_the_beginning_of_a_text_has_few_tokens_more_than_the_text(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    beginning = text[: data.draw(st.integers(0, len(text)))]
    both = [len(tokenizer.encode(one, add_special_tokens=False).ids) for one in (beginning, text)]
    assert both[0] <= both[1] + 16


@pytest.mark.parametrize(("word", "num_read"), [("a b", [8 * 1034]), ("\x04", [8 * 1034, 90_000])])
async def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenized(
    word: str, num_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled model makes no tokens of a control character: such a text is never too long."""
    tokenizer, read = model_tokenizer(), list[int]()
    encode = tokenizer.encode

    def counted(text: str, add_special_tokens: bool) -> list[int]:
        read.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counted)
    ids = await tokenizer.encode_prompt(Rendered(word * (90_000 // len(word))), False, most=10)
    assert (len(ids) > 10) == (word != "\x04") and read == num_read
