"""Text as it streams: whole characters, nothing past a stop string, nothing lost, whatever the token borders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import loaded, tiny

from pdlab import LLM, SamplingParams
from pdlab.engine.text import TextStream
from pdlab.kernels.ops import SampleResult, SamplingBatch
from pdlab.models.tokenizer import ByteTokenizer


class Pieces:
    """A decoder whose token i is the i-th of some given pieces of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


@settings(deadline=None)
@given(st.lists(st.text("ab\n", max_size=4), max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_all_text_up_to_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    stream = TextStream(Pieces(pieces), stops)
    out, whole = "", ""
    for i, piece in enumerate(pieces):
        whole += piece
        out += stream.push(i)
        found = min((at for s in stops if (at := whole.find(s)) >= 0), default=None)
        assert stream.stopped == (found is not None)  # seen with the token that completes it, no later
        if found is not None:
            assert out == whole[:found] == stream.text
            break
        assert whole.startswith(out)
        held = whole[len(out) :]
        assert any(s.startswith(held) for s in stops) or not held  # held back only while it may become a stop
    else:
        assert out + stream.end() == whole == stream.text


@pytest.fixture
def scripted() -> Iterator[tuple[LLM, dict[int, bytes]]]:
    """An LLM that says what is written under a request's seed, byte by byte."""
    scripts: dict[int, bytes] = {}
    llm = tiny()
    model = llm.engine.executor.model  # type: ignore[attr-defined]

    def sample(x: torch.Tensor, sampling: SamplingBatch) -> SampleResult:
        pairs = zip(sampling.seed.tolist(), sampling.position.tolist(), strict=True)
        return SampleResult(torch.tensor([scripts[seed][i] if i < len(scripts[seed]) else 257 for seed, i in pairs]))

    model.sample = sample
    yield llm, scripts
    del model.sample
    llm.close()


def say(scripted: tuple[LLM, dict[int, bytes]], text: str | bytes, **params: object) -> tuple[str, str, list[int]]:
    """(text, finish_reason, token ids), equal whether generated or streamed."""
    llm, scripts = scripted
    scripts[1] = text.encode() if isinstance(text, str) else text
    sampling = SamplingParams(max_tokens=99, seed=1, **params)  # type: ignore[arg-type]
    [output] = llm.generate("x", sampling)
    events = list(llm.stream("x", sampling))
    assert "".join(e.text for e in events) == output.text
    assert [e.token_id for e in events if e.token_id >= 0] == output.token_ids
    assert events[-1].finish_reason == output.finish_reason
    assert not any(e.finish_reason for e in events[:-1])
    return output.text, output.finish_reason, output.token_ids


def test_the_models_end_token_stops_and_is_a_token_but_no_text(scripted) -> None:
    text, reason, ids = say(scripted, "ahoy")
    assert (text, reason, ids[-1], len(ids)) == ("ahoy", "stop", 257, 5)
    text, reason, ids = say(scripted, "ahoy", ignore_eos=True)
    assert reason == "length"
    assert len(ids) == 99
    assert text == "ahoy"


def test_a_stop_string_across_token_borders_ends_the_text_before_it(scripted) -> None:
    assert say(scripted, "one two\n\n#three", stop="\n\n#")[:2] == ("one two", "stop")
    assert say(scripted, "one two\n\n+three", stop="\n\n#")[:2] == ("one two\n\n+three", "stop")
    assert say(scripted, "abcabd", stop=("abd", "zzz"))[:2] == ("abc", "stop")
    assert say(scripted, "stop", stop=("s",))[:2] == ("", "stop")


def test_what_was_held_back_comes_out_when_the_length_ends_the_request(scripted) -> None:
    llm, scripts = scripted
    scripts[1] = b"half a st"
    events = list(llm.stream("x", SamplingParams(max_tokens=9, seed=1, stop="stop")))
    assert "".join(e.text for e in events) == "half a st"
    assert events[-1].finish_reason == "length"
    assert "".join(e.text for e in events[:-1]) == "half a "


def test_a_stop_token_ends_like_the_models_own(scripted) -> None:
    assert say(scripted, "one;two", stop_token_ids=(ord(";"),)) == ("one", "stop", [*b"one;"])


def test_characters_of_several_bytes_come_whole_also_as_stop_strings(scripted) -> None:
    llm, scripts = scripted
    assert say(scripted, "naïve 🦉 owl")[:2] == ("naïve 🦉 owl", "stop")
    assert say(scripted, "ein 🦉 und 🦊 mehr", stop="🦊")[:2] == ("ein 🦉 und ", "stop")
    scripts[1] = "a🦉".encode()
    pieces = [e.text for e in llm.stream("x", SamplingParams(max_tokens=5, seed=1))]
    assert pieces[0] == "a"
    assert pieces[1:4] == ["", "", ""]
    assert pieces[4] == "🦉"
    assert say(scripted, "a🦉".encode()[:3])[0].startswith("a\N{REPLACEMENT CHARACTER}")  # it ended half-way


def test_each_request_has_its_own_text(scripted) -> None:
    llm, scripts = scripted
    scripts |= {i: f"request {i}, {'so ' * i}end".encode() for i in range(2, 7)}
    params = [SamplingParams(max_tokens=60, seed=i, stop="end") for i in range(2, 7)]
    assert [o.text for o in llm.generate(["x"] * 5, params)] == [f"request {i}, {'so ' * i}" for i in range(2, 7)]
    by_request: dict[int, str] = {}
    for event in llm.stream(["x"] * 5, params):
        by_request[event.request_id] = by_request.get(event.request_id, "") + event.text
    assert list(by_request.values()) == [f"request {i}, {'so ' * i}" for i in range(2, 7)]


def test_streaming_a_model_with_a_tokenizer_gives_generates_text() -> None:
    assert isinstance(loaded("random:llama-tiny").tokenizer, ByteTokenizer)
    with tiny() as llm:
        params = SamplingParams(max_tokens=40, temperature=1.2, seed=11, ignore_eos=True)
        assert "".join(e.text for e in llm.stream("abc", params)) == llm.generate("abc", params)[0].text
