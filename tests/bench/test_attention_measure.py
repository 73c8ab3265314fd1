"""What is timed beside what: a wrong kernel never, a rival that refuses is named, this project's own refusal is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdlab.bench import _attention, _turns, attention_decode, attention_dispatch, ceilings, suites
from pdlab.costs.roofline import Ceilings

BACKEND = _attention.backend


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode suite with two small cases and no ceilings to measure."""
    _attention._ceilings.cache_clear()
    monkeypatch.setattr(ceilings, "measure", lambda *args, **kwargs: Ceilings(1e10, 1e10, 1e11, "measured"))
    monkeypatch.setattr(attention_decode, "_SMOKE", [(2, 40, 16), (2, 33, 0)])


def _wrong(q: torch.Tensor, view: Any) -> torch.Tensor:
    return BACKEND("plain", q, view, len(view.host_lens))(q, view) * 1.001


def _small() -> tuple[torch.Tensor, Any]:
    return _attention.make_view([9], [9], heads=2, kv_heads=1, head_dim=8, page=4, dtype="float32", device="cpu", seed=0)


def test_a_wrong_kernel_is_not_timed() -> None:
    q, view = _attention.make_view(
        [30, 20], [30, 20], heads=2, kv_heads=1, head_dim=8, page=4, dtype="float32", device="cpu", seed=0
    )  # fmt: skip
    right = _attention.backend("plain", q, view, 2)
    _attention.check("right", right, q, view)
    with pytest.raises(AssertionError, match="relative error"):
        _attention.check("wrong", _wrong, q, view)
    found = _attention.measure({"right": right, "wrong": _wrong}, q, view, graph=False, rounds=1, budget_ms=1)
    assert set(found.times) == {"right"}
    assert "relative error" in found.left_out["wrong"]


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError])
@pytest.mark.parametrize("own", _attention.OWN)
def test_a_rival_that_refuses_is_named_with_its_reason_and_our_own_refusal_is_raised(own: str, error: type[Exception]) -> None:
    def refuses(q: torch.Tensor, view: Any) -> torch.Tensor:
        raise error("no kernel\n for this shape")

    q, view = _small()
    right = BACKEND("plain", q, view, 1)
    found = _attention.measure({"fa3": refuses, own: right}, q, view, graph=False, rounds=1, budget_ms=1)
    assert set(found.times) == {own}
    assert found.left_out == {"fa3": f"{error.__name__}: no kernel for this shape"}
    with pytest.raises(error, match="no kernel"):
        _attention.measure({"fa3": right, own: refuses}, q, view, graph=False, rounds=1, budget_ms=1)


def _tires(call: Any, after: int) -> Any:
    """`call`, which refuses from its call number `after` on."""
    calls = iter(range(after))

    def run(q: torch.Tensor, view: Any) -> torch.Tensor:
        if next(calls, None) is None:
            raise RuntimeError("no more")
        return call(q, view)  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize("after", [1, 2, 8], ids=["warming up", "in the first turn", "in a later one"])
def test_a_rival_that_refuses_after_its_check_is_named_and_our_own_refusal_is_raised(after: int) -> None:
    q, view = _small()
    right, more = BACKEND("plain", q, view, 1), {"graph": False, "rounds": 3, "budget_ms": 1e-6}  # three samples a turn
    found = _attention.measure({"fa3": _tires(right, after), "ours": right, "sdpa": right}, q, view, **more)
    assert set(found.times) == {"ours", "sdpa"}
    assert found.left_out == {"fa3": "RuntimeError: no more"}
    with pytest.raises(RuntimeError, match="no more"):
        _attention.measure({"fa3": right, "ours": _tires(right, after)}, q, view, **more)


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("whose", ["fa3", "ours"])
def test_a_capture_that_fails_is_a_rivals_row_and_an_error_of_our_own(whose: str, monkeypatch: Any) -> None:
    from pdlab.hardware.timing import Timings

    def graph_time_us(call: Any, **settings: Any) -> Timings:
        if call is calls[whose]:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Timings(1000.0, 1000.0, 1000.0, 3, "us")

    q, view = _small()
    calls: dict[str, Any] = {name: _tires(BACKEND("plain", q, view, 1), 1000) for name in ("fa3", "ours", "sdpa")}
    monkeypatch.setattr(_attention, "graph_time_us", graph_time_us)
    monkeypatch.setattr(_attention, "time_ms", lambda call, **settings: Timings(1.0, 1.0, 1.0, 3))
    on_gpu, plain = q.as_subclass(OnGpu), _attention.last_request(q, view)
    if whose == "ours":
        with pytest.raises(RuntimeError, match="capturing"):
            _attention.measure(calls, on_gpu, view, graph=True, truth=plain)
        return
    found = _attention.measure(calls, on_gpu, view, graph=True, truth=plain)
    assert {name: t.median for name, t in found.times.items()} == {"ours": 1.0, "sdpa": 1.0}
    assert found.left_out["fa3"].startswith("RuntimeError: operation not permitted")


@pytest.mark.gpu
def test_what_cannot_be_captured_is_left_out_and_the_others_are_timed_as_ever() -> None:
    q, view = _attention.make_view(
        [64, 90], [1, 1], heads=4, kv_heads=2, head_dim=64, page=16, dtype="bfloat16", device="cuda", seed=0
    )  # fmt: skip
    right = BACKEND("sdpa", q, view, 2)

    def waits(q: torch.Tensor, view: Any) -> torch.Tensor:
        torch.cuda.synchronize()
        return right(q, view)  # type: ignore[no-any-return]

    here = torch.cuda.current_stream()
    found = _attention.measure({"fa3": waits, "ours": BACKEND("auto", q, view, 2)}, q, view, graph=True, budget_ms=5)
    assert set(found.times) == {"ours"}
    assert "fa3" in found.left_out
    assert torch.cuda.current_stream() == here


def test_what_no_rival_refuses_with_is_raised_whoever_raises_it() -> None:
    q, view = _small()
    with pytest.raises(ZeroDivisionError):
        _attention.measure({"fa3": lambda q, view: 1 / 0}, q, view, graph=False, rounds=1, budget_ms=1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("whose", ["flashinfer", "ours"])
def test_a_refusal_in_a_suite_is_a_row_of_a_rival_and_an_error_of_our_own(whose: str, tmp_path: Path, monkeypatch: Any) -> None:
    def refuses(q: torch.Tensor, view: Any) -> torch.Tensor:
        raise RuntimeError("no kernel fits")

    def measure(calls: Any, *rest: Any, real: Any = _attention.measure, **settings: Any) -> _attention.Measured:
        return real(calls | {whose: refuses}, *rest, **settings)

    monkeypatch.setattr(_attention, "measure", measure)
    if whose == "ours":
        with pytest.raises(RuntimeError, match="no kernel fits"):
            suites.run("attention_decode", device="cpu", out=tmp_path, say=lambda line: None)
        return
    _, recorder = suites.run("attention_decode", device="cpu", out=tmp_path, say=lambda line: None)
    skipped = [(row.variant, row.status) for row in recorder.rows if not row.ok]
    assert skipped == [("flashinfer", "skipped:RuntimeError: no kernel fits")] * 2
    assert {row.variant for row in recorder.rows if row.ok} >= {"plain", "sdpa"}


@pytest.mark.usefixtures("quick")
def test_a_suite_whose_own_attention_is_wrong_writes_the_rest_and_fails(tmp_path: Path, monkeypatch: Any) -> None:
    real = _attention.backend
    monkeypatch.setattr(_attention, "backend", lambda name, *rest: _wrong if name == "sdpa" else real(name, *rest))
    monkeypatch.setattr(_attention, "insist", lambda ctx, insist=_attention.insist: insist(ctx, "sdpa"))
    with pytest.raises(AssertionError, match="2 cases are wrong"):
        suites.run("attention_decode", device="cpu", out=tmp_path, say=lambda line: None)
    (table,) = tmp_path.glob("*/attention_decode.csv")
    assert ",plain," in table.read_text()
    assert ",sdpa," in table.read_text()
    assert "skipped:Wrong: sdpa is wrong" in table.read_text()


@pytest.mark.usefixtures("quick")
def test_a_cell_in_which_every_backend_is_wrong_is_written_before_the_suite_fails(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(attention_dispatch._CELLS, "smoke", [("prefill", 24, 2), ("decode", 40, 3)])
    monkeypatch.setattr(_attention, "backend", lambda name, *rest: _wrong)
    monkeypatch.setattr(_attention, "insist", lambda ctx, insist=_attention.insist: insist(ctx, "sdpa"))
    with pytest.raises(AssertionError, match="cases are wrong"):
        suites.run("attention_dispatch", device="cpu", out=tmp_path, say=lambda line: None)
    (table,) = tmp_path.glob("*/attention_dispatch.csv")
    assert all(phase in table.read_text() for phase in ("prefill", "decode"))


def test_variants_are_timed_in_turns_that_begin_with_another_each_round() -> None:
    from pdlab.hardware.timing import Timings

    order: list[str] = []

    def timer(name: str) -> Any:
        return lambda: order.append(name) or Timings(float(len(order)), 0, 0, 1)

    found = _turns.in_turns({name: timer(name) for name in "abc"}, 3, 0.0, pytest.fail)
    assert "".join(order) == "abcbcacab"
    assert {name: t.median for name, t in found.items()} == {"a": 6.0, "b": 4.0, "c": 5.0}  # of 1 6 8, 2 4 9 and 3 5 7
