"""Rooflines bound from below, say which ceiling binds, and prefer what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.core.plan import PlanShape
from pdlab.costs import kv_sizes, roofline, tables
from pdlab.costs.formulas import decode_shape, prefill_shape, step_bytes, step_flops
from pdlab.costs.roofline import Ceilings, ceilings_for, littles_law_latency, op_times, step_time
from pdlab.costs.tables import COLUMNS, Row
from pdlab.models.catalogue import config_of

CARD = Ceilings(4.6e12, 4.3e12, 7e14, "measured")
CFG = config_of("llama-3-8b")


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 8192)), max_size=3).map(tuple),
    st.integers(0, 256),
    st.integers(1, 20000),
)
def test_no_step_is_faster_than_either_ceiling_allows(prefill: tuple[tuple[int, int], ...], decodes: int, kv: int) -> None:
    shape = PlanShape(prefill, decodes, decodes * kv, 0, len(prefill) + decodes)
    r = step_time(CFG, shape, CARD, 2)
    assert r.seconds == max(r.flops / CARD.matmul_flops_per_s, r.bytes / CARD.read_bytes_per_s)
    assert r.sequence_seconds >= r.seconds * (1 - 1e-12)
    assert r.sequence_seconds == pytest.approx(sum(o.seconds for o in op_times(CFG, shape, CARD, 2).values()))
    assert (r.bound == "compute") == (r.intensity > CARD.ridge)


def test_decode_is_bound_by_bandwidth_and_prefill_by_compute() -> None:
    assert step_time(CFG, decode_shape(1, 2048), CARD, 2).bound == "bandwidth"
    assert step_time(CFG, decode_shape(32, 2048), CARD, 2).bound == "bandwidth"
    assert step_time(CFG, prefill_shape(2048), CARD, 2).bound == "compute"


def test_single_stream_decode_has_the_known_floor() -> None:
    # 308 tokens a second for this shape from weights alone at 4.63 TB/s; the 512 cached tokens cost another half per cent
    seconds = step_time(CFG, decode_shape(1, 512), Ceilings(4.63e12, 4.26e12, 7e14), 2).seconds
    assert 1 / seconds == pytest.approx(308, rel=0.01)


def test_littles_law() -> None:
    assert littles_law_latency(100, 520) == pytest.approx(0.1923, rel=1e-3)


def _table(folder: Path, rows: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ceilings.csv").write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")


def _row(metric: str, value: float, unit: str, params: str = "{}", status: str = "ok", kind: str = "measured") -> str:
    quoted = params.replace('"', '""')
    return f'r,2026-01-01T00:00:00Z,ceilings,ours,"{quoted}",{metric},{unit},{value},{value},{value},5,{kind},{status},p'


BF16 = '{"dtype":"bfloat16","n":4096}'


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty shipped and user folders: what the repository holds must not decide a test."""
    monkeypatch.setattr(tables, "data_dir", lambda: tmp_path / "data")
    monkeypatch.setattr(tables, "home_dir", lambda: tmp_path / "home")
    return tmp_path


def test_without_measurements_ceilings_are_the_data_sheets_and_marked(places: Path) -> None:
    c = ceilings_for("nvidia-h200")
    assert (c.read_bytes_per_s, c.source, c.kind) == (4.8e12, "data sheet", "predicted")
    assert ceilings_for("tesla-t4", "float16").matmul_flops_per_s == 65e12


def test_an_engine_has_ceilings_on_a_device_that_nobody_knows(places: Path) -> None:
    assert ceilings_for("cpu-riscv64", "float32").source == "assumed"
    assert ceilings_for("nvidia-geforce-gtx-9999").kind == "predicted"


def test_measured_ceilings_replace_the_data_sheet_and_the_users_own_replace_the_shipped(places: Path) -> None:
    shipped, own = (places / p / "measurements" / "nvidia-h200" for p in ("data", "home"))
    rows = [_row("read", 4.6, "TB/s"), _row("copy", 4.2, "TB/s"), _row("matmul", 700, "TFLOP/s", BF16)]
    _table(shipped, rows)
    c = ceilings_for("nvidia-h200")
    assert (c.read_bytes_per_s, c.copy_bytes_per_s, c.matmul_flops_per_s) == pytest.approx((4.6e12, 4.2e12, 7e14))
    assert c.kind == "measured"
    assert ceilings_for("nvidia-h200", "float32").source == "data sheet"  # no product was measured in this dtype
    _table(own, [_row("read", 4.4, "TB/s")])
    assert ceilings_for("nvidia-h200").read_bytes_per_s == pytest.approx(4.4e12)


def test_a_throttled_or_predicted_row_is_no_ceiling(places: Path) -> None:
    rows = [
        _row("read", 4.6, "TB/s"),
        _row("read", 3.0, "TB/s", status="throttled"),
        _row("read", 9.9, "TB/s", kind="predicted"),
        _row("copy", 4.2, "TB/s"),
        _row("matmul", 650, "TFLOP/s", BF16),
        _row("matmul", 700, "TFLOP/s", '{"dtype":"bfloat16","n":8192}'),
    ]
    _table(places / "data" / "measurements" / "nvidia-h200", rows)
    c = ceilings_for("nvidia-h200")
    assert c.read_bytes_per_s == pytest.approx(4.6e12)
    assert c.matmul_flops_per_s == pytest.approx(7e14)  # the best size


def test_the_newest_ok_row_of_a_key_counts_whatever_the_order_of_its_parameters() -> None:
    def row(value: float, status: str = "ok", **params: object) -> Row:
        return Row("r", "t", "e", "ours", "m", "ms", value, value, value, 1, status=status, params=dict(params))

    rows = [row(1, a=1, b=2), row(2, b=2, a=1), row(3, "throttled", a=1, b=2), row(4, a=1, b=3)]
    assert [r.median for r in tables.newest(rows)] == [2, 4]


def test_kv_solutions_have_the_size_they_claim() -> None:
    found = kv_sizes.solve_kv_models(8e9, 2048, memory_bytes=40 * 2**30)
    assert found
    for s in found:
        assert 7e9 <= s.kv_bytes <= 9e9
        assert s.fits == (s.kv_bytes + s.weights_bytes <= 40 * 2**30)
    assert {(s.model, s.batch) for s in found if s.dtype == "float16"} >= {("llama-2-7b", 8), ("bloom-176b", 1)}
    assert not any(s.batch == 1 and s.fits for s in found)


def test_llama_2_7b_has_half_a_megabyte_a_token() -> None:
    (row,) = kv_sizes.kv_table(1, shapes=[s for s in kv_sizes.known_shapes() if s.name == "llama-2-7b"])
    assert row.kv_bytes == 2**19


def test_the_widest_model_has_the_cache_and_the_weights_it_was_asked_for() -> None:
    hidden, layers = kv_sizes.widest_multi_head_model(4e6, 40e9, 2)
    assert 2 * layers * hidden * 2 == pytest.approx(4e6)
    assert 12 * layers * hidden**2 * 2 == pytest.approx(40e9)


def test_the_roofline_of_a_step_is_made_of_its_counts() -> None:
    shape = decode_shape(7, 99)
    r = step_time(CFG, shape, CARD, 2)
    assert (r.flops, r.bytes) == (step_flops(CFG, shape).total, step_bytes(CFG, shape, 2).total)
    assert roofline.roofline(0, 0, CARD).seconds == 0
