"""Text and tokens: streams that never show half a character, folders' tokenizers, chat templates that may be hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from pdlab.core.errors import InvalidRequest
from pdlab.models.catalogue import config_of
from pdlab.models.hf import read_tokenizer
from pdlab.models.tokenizer import CHATML, ByteTokenizer, render_chat

BYTES = ByteTokenizer(config_of("llama-tiny"))
HELLO = [{"role": "user", "content": "Hello"}]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_a_stream_gives_whole_characters_that_join_to_the_text(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    decoder = BYTES.stream()
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.flush() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([0x80, 0xF0, 0x9F, 0x98, 0xE2, 0x82, 0xAC, 97, 257, 300]) | st.integers(0, 383), max_size=90))
@example([0x80] * 7 + [0xF0, 0x9F, 0x98, 0x80] * 20)  # what looked unfinished for long ends in characters
def test_a_stream_of_any_tokens_joins_to_their_decoding(ids: list[int]) -> None:
    decoder = BYTES.stream()
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == BYTES.decode(ids)


def test_a_character_is_shown_with_its_last_byte_and_half_of_one_only_at_the_end() -> None:
    decoder = BYTES.stream()
    assert [decoder.push(b) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert [decoder.push(b) for b in "🙂".encode()[:2]] == ["", ""]
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.flush() == ""


def test_byte_tokens_of_a_random_model_are_visible_and_its_end_tokens_are_not() -> None:
    config = config_of("llama-tiny")
    assert config.bos_token_id is not None
    assert BYTES.encode("a", add_bos=True) == [config.bos_token_id, 97]
    assert BYTES.decode([97, 300, *config.eos_token_ids, 98]) == "a⟨300⟩b"


def write_tokenizer(folder: Path, **settings_: object) -> None:
    """A byte-level tokenizer whose tokenizer.json adds a begin token, as LLaMA 3's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*alphabet, "he", "Ġhe"])}, merges=[("h", "e"), ("Ġ", "he")])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings_})
    )


def test_a_folders_tokenizer_begins_texts_as_the_model_was_trained(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    write_tokenizer(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("he he") == [258, 256, 257]
    assert tokenizer.encode("he", add_bos=False) == [256]
    assert tokenizer.encode("he", add_bos=True) == [258, 256]
    assert tokenizer.decode([258, 256, 257, 259]) == "he he"
    assert tokenizer.vocab_size == 260
    write_tokenizer(tmp_path, add_bos_token=False)
    without = read_tokenizer(tmp_path)
    assert without is not None
    assert without.encode("he") == [256]
    with pytest.raises(InvalidRequest, match="no chat template"):
        without.chat(HELLO)


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_chat_templates_are_found_wherever_a_folder_keeps_them(tmp_path: Path, where: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}he{% endif %}"
    if where == "file":
        write_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        named = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
        write_tokenizer(tmp_path, chat_template=template if where == "config" else named)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.chat([{"role": "user", "content": "he"}]) == [258, 256, 256]  # one begin token, not two


def test_chatml_frames_each_message() -> None:
    assert render_chat(CHATML, HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert BYTES.decode(BYTES.chat(HELLO)).startswith("<|im_start|>user\nHello")


@pytest.mark.parametrize(
    "messages",
    [[], "hi", [{"role": "user"}], ["hi"], None, [{"role": "user", "content": None}], [{"role": 5, "content": "hi"}]],
)
def test_what_is_no_conversation_is_refused(messages: object) -> None:
    with pytest.raises(InvalidRequest, match="role"):
        render_chat(CHATML, messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for m in messages %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
    ],
    ids=["refuses", "broken", "reaches for Python", "changes the messages", "wrong types", "wrong arithmetic"],
)
def test_a_template_that_fails_or_reaches_out_is_an_error_of_the_request(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render_chat(template, HELLO)
