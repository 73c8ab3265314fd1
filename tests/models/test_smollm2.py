"""The real default model, when it is in the cache: its loss, its answer, its tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from feeding import Feeder, whole_logits

from pdlab.models.catalogue import config_of, parameter_count
from pdlab.models.fetch import fetch
from pdlab.models.gguf_file import read_config

pytestmark = pytest.mark.xdist_group("smollm2")


def english(smollm: Any, tokens: int) -> list[int]:
    from pydoc_data.topics import topics

    return smollm.tokenizer.encode(topics["assert"] + topics["import"])[:tokens]


def loss(logits: torch.Tensor, ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


def test_loss_on_english_is_that_of_a_correctly_read_model(smollm: Any) -> None:
    """Q and K rows left in the file's order would still answer questions, at twice this loss."""
    ids = english(smollm, 160)
    assert loss(whole_logits(smollm.model, ids), ids) < 3.3


@pytest.mark.slow
def test_logits_and_loss_match_transformers_own_gguf_loader(smollm: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers loads GGUF files only where accelerate is installed")
    path = fetch("smollm2-135m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = english(smollm, 400)
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0]
    got = whole_logits(smollm.model, ids)
    assert abs(loss(got, ids) - loss(want, ids)) < 1e-4
    # 30 layers in float32, logits up to 41: measured 8e-5
    assert (got - want).abs().max() < 3e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_the_catalogue_says_what_the_file_says(smollm: Any) -> None:
    from_file = read_config(fetch("smollm2-135m"))
    assert dataclasses.replace(from_file, name="smollm2-135m") == config_of("smollm2-135m") == smollm.config
    assert parameter_count(smollm.config) == 134_515_008 == sum(t.numel() for t in smollm.model.tensors())


def test_chat_answers_paris(smollm: Any) -> None:
    ids = smollm.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    feeder = Feeder(smollm.model, 16, 1, 64)
    decoder = smollm.tokenizer.stream()
    text, new = "", ids
    for _ in range(12):
        token = int(feeder.step([(0, new)])[0][-1].argmax())
        if token in smollm.config.eos_token_ids:
            break
        text += decoder.push(token)
        new = [token]
    assert text + decoder.flush() == "The capital of France is Paris."


def test_digits_are_split_one_by_one(smollm: Any) -> None:
    encode, decode = smollm.tokenizer.encode, smollm.tokenizer.decode
    assert [decode([i]) for i in encode("In 2024, 1337")] == ["In", " ", "2", "0", "2", "4", ",", " ", "1", "3", "3", "7"]


@pytest.mark.parametrize("text", ["", " ", "naïve café, 日本語 and 🙂👩‍👩‍👧", "line\n\n\tend  ", "a" * 100])
def test_text_survives_the_tokenizer(smollm: Any, text: str) -> None:
    ids = smollm.tokenizer.encode(text)
    assert smollm.tokenizer.decode(ids) == text
    decoder = smollm.tokenizer.stream()
    pieces = [decoder.push(i) for i in ids] + [decoder.flush()]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)


def test_special_tokens_frame_a_chat_and_vanish_from_text(smollm: Any) -> None:
    ids = smollm.tokenizer.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert ids.count(smollm.config.bos_token_id) == 3  # system, user, and the assistant's turn begun
    assert "im_start" not in smollm.tokenizer.decode(ids)
