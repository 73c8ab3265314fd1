"""The ledger: every claim is there, every verdict is drawn from rows or formulas, and other rows give another verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ledger import GPU, of, recorder

from pdlab import claims
from pdlab.claims.evidence import Evidence, Pair
from pdlab.core.errors import MeasurementError
from pdlab.costs.tables import Row

IDS = "A1 A2 A3 B1 B2 B3 B4 B5 C1 C2 C3 C4 C5 D1 D2 E1 E2 E3 F1 G1 G2 G3 H1 H2".split()  # noqa: SIM905  one line reads better

pytestmark = pytest.mark.usefixtures("places")


def test_every_claim_of_the_article_has_a_line_and_a_rule() -> None:
    found = claims.read_claims()
    assert [c.id for c in found] == IDS
    for claim in found:
        assert claim.rule in claims.RULES
        assert claim.claim
        assert claim.article
        assert (claims.RULES[claim.rule].__doc__ or "").strip()


def test_with_nothing_measured_only_arithmetic_decides() -> None:
    verdicts = claims.judge()
    assert [v.id for v in verdicts] == IDS
    impossible = {v.id for v in verdicts if v.verdict == "impossible"}
    assert impossible == {"A2", "C1", "C2", "C3", "E3"}
    assert {v.verdict for v in verdicts if v.id not in impossible} == {"not_measured"}
    for v in verdicts:
        doc = json.loads(json.dumps(v.to_dict(), allow_nan=False))
        assert set(doc) == {"id", "section", "claim", "article", "ours", "verdict", "rule", "reason"}
        if doc["ours"] is not None:
            assert set(doc["ours"]) == {"value", "unit", "kind", "device", "provenance_id"}
            assert doc["ours"]["kind"] == "predicted"


def _ledger(places: Path, id: str, **changes: Any) -> Path:
    """The shipped line of one claim with some of its figures changed."""
    import csv
    from dataclasses import asdict

    claim = asdict(next(c for c in claims.read_claims() if c.id == id))
    claim["figures"] = json.dumps(claim["figures"] | changes)
    path = places / "claims.csv"
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(claim))
        writer.writeheader()
        writer.writerow(claim)
    return path


def test_littles_law_forbids_only_a_mean_above_the_p99(places: Path) -> None:
    assert "192 ms" in of("C1").reason
    (lenient,) = claims.judge(path=_ledger(places, "C1", p99_ms=400))
    assert lenient.verdict == "not_measured"


def test_the_contradiction_of_e2_and_e3_goes_when_the_figures_agree(places: Path) -> None:
    assert "3.44 ms" in of("E3").reason
    (agreeing,) = claims.judge(path=_ledger(places, "E3", after_ms=3.45))
    assert agreeing.verdict == "not_measured"


def test_eight_gigabytes_is_possible_on_a_card_that_holds_such_a_model(places: Path) -> None:
    assert "bloom-176b" in of("A2").reason
    (small,) = claims.judge(path=_ledger(places, "A2", bytes=1.07e9))  # llama-2-7b's own size at 2048 tokens
    assert small.verdict == "reproduced"


def test_the_plain_times_of_b5_fit_one_number_of_heads(places: Path) -> None:
    assert "14,236 to 16,582 heads" in of("B5").reason  # 12, 185 and 738 ms are nearly n squared
    (other,) = claims.judge(path=_ledger(places, "B5", ms={"1024": [185, 62], "2048": [2 * 738, 214]}))
    assert "16,582 to 33,1" not in of("B5").reason
    assert "to 33,1" in other.reason


def _steps(places: Path, phase: str, compute: float, bandwidth: float, batch: int = 1, tokens: int = 2048) -> None:
    with recorder(places, "prefill_vs_decode") as record:
        for metric, value in (("compute_utilization", compute), ("bandwidth_utilization", bandwidth)):
            record.add(metric, value, "percent", model="llama-1b", phase=phase, batch=batch, tokens=tokens, dtype="bfloat16")


@pytest.mark.parametrize(("compute", "bandwidth", "verdict"), [(80, 15, "reproduced"), (10, 30, "not_reproduced")])
def test_a1_depends_on_which_ceiling_prefill_uses(places: Path, compute: float, bandwidth: float, verdict: str) -> None:
    _steps(places, "prefill", compute, bandwidth)
    assert of("A1").verdict == verdict


@pytest.mark.parametrize(
    ("compute", "bandwidth", "verdict"),
    [(1, 80, "reproduced"), (45, 70, "partly"), (20, 10, "partly"), (60, 30, "not_reproduced")],
)
def test_a3_wants_low_compute_and_high_bandwidth(places: Path, compute: float, bandwidth: float, verdict: str) -> None:
    _steps(places, "decode", compute, bandwidth)
    v = of("A3")
    assert v.verdict == verdict
    assert v.ours is not None
    assert (v.ours["value"], v.ours["kind"], v.ours["device"]) == (compute, "measured", GPU)


@pytest.mark.parametrize(("share", "verdict"), [(85, "reproduced"), (40, "partly"), (9, "not_reproduced")])
def test_e1_is_the_share_of_time_in_which_the_memory_is_busy(places: Path, share: float, verdict: str) -> None:
    _steps(places, "decode", 1, share)
    assert of("E1").verdict == verdict


def _fused(places: Path, ours: float, unfused: float, **rest: Any) -> None:
    with recorder(places, "fused_norm_qkv_rope") as record:
        for variant, value in (("ours", ours), ("unfused", unfused)):
            record.add("latency", value, "us", variant=variant, params={"model": "m", "batch": 1, "graph": False} | rest)


@pytest.mark.parametrize(
    ("unfused", "verdict"), [(25, "reproduced"), (15, "partly"), (10.1, "not_reproduced"), (5, "not_reproduced")]
)
def test_a_gain_is_graded_against_the_claimed_ratio(places: Path, unfused: float, verdict: str) -> None:
    _fused(places, 10, unfused)
    v = of("D1")
    assert v.verdict == verdict
    assert v.ours is not None
    assert v.ours["value"] == pytest.approx(unfused / 10)


def test_rows_of_different_runs_or_parameters_are_never_divided(places: Path) -> None:
    for variant, params in (("ours", {"batch": 1}), ("unfused", {"batch": 1}), ("unfused", {"batch": 2})):
        with recorder(places, "fused_norm_qkv_rope") as record:  # a run of its own each
            record.add("latency", 10.0, "us", variant=variant, params={"graph": False} | params)
    assert of("D1").verdict == "not_measured"


def test_the_newest_run_that_holds_both_sides_counts(places: Path) -> None:
    _fused(places, 10, 15)
    _fused(places, 10, 30)
    with recorder(places, "fused_norm_qkv_rope") as record:  # newer, but without its rival
        record.add("latency", 1.0, "us", params={"model": "m", "batch": 1, "graph": False})
    v = of("D1")
    assert v.ours is not None
    assert v.ours["value"] == pytest.approx(3)


def test_throttled_and_predicted_rows_are_no_evidence(places: Path) -> None:
    with recorder(places, "fused_norm_qkv_rope") as record:
        for variant, status, kind in (
            ("ours", "throttled", "measured"),
            ("unfused", "ok", "measured"),
            ("ours", "ok", "predicted"),
        ):
            record.add("latency", 10.0, "us", variant=variant, status=status, kind=kind, graph=False)
    assert of("D1").verdict == "not_measured"


def test_measured_rows_are_preferred_to_simulated_ones_and_these_are_marked(places: Path) -> None:
    def run(kind: str, value: float) -> None:
        with recorder(places, "scheduling_mixed_load") as record:
            for variant, ms in (("fcfs", 100.0), ("article", value)):
                record.add("end_to_end", ms, "ms", variant=variant, kind=kind, quantile=99, load=0.9)

    run("simulated", 50.0)
    v = of("F1")
    assert v.ours is not None
    assert (v.verdict, v.ours["kind"]) == ("reproduced", "simulated")
    run("measured", 90.0)
    v = of("F1")
    assert v.ours is not None
    assert (v.verdict, v.ours["kind"], v.ours["value"]) == ("partly", "measured", 10)


def test_a_scheduler_that_leaves_requests_unanswered_has_no_tail(places: Path) -> None:
    with recorder(places, "scheduling_mixed_load") as record:
        for variant, ms, lost in (("fcfs", 100.0, 0), ("article", 20.0, 12), ("sjf", 90.0, 0)):
            record.add("end_to_end", ms, "ms", variant=variant, kind="simulated", quantile=99, load=0.9)
            record.add(
                "ttft", ms / 10 if variant == "sjf" else ms, "ms", variant=variant, kind="simulated", quantile=99, load=0.9
            )
            record.add("unfinished", lost, "count", variant=variant, kind="simulated", load=0.9)
    v = of("F1")
    assert v.ours is not None
    assert (v.verdict, v.ours["value"]) == ("partly", 10)
    assert "article is left out" in v.reason
    assert "ttft is 91 % lower" in v.reason


def _ablation(places: Path, model: str, throughput: list[float], p99: list[float]) -> None:
    with recorder(places, "ablation") as record:
        for stage, (t, ms) in enumerate(zip(throughput, p99)):
            record.add("throughput", t, "req/s", model=model, stage=stage)
            record.add("latency", ms, "ms", model=model, stage=stage, quantile=99)


def test_the_whole_stack_is_last_over_first(places: Path) -> None:
    _ablation(places, "llama-1b", [1, 2, 4], [230, 100, 80])
    assert of("H1").verdict == "reproduced"
    _ablation(places, "llama-1b", [1, 2, 4], [230, 100, 200])
    assert of("H1").verdict == "partly"
    _ablation(places, "llama-1b", [1, 1, 1.1], [230, 100, 200])
    assert of("H1").verdict == "not_reproduced"


def test_families_differ_when_a_stage_helps_one_more(places: Path) -> None:
    _ablation(places, "llama-1b", [1, 2, 4], [3, 2, 1])
    assert of("H2").verdict == "not_measured"
    _ablation(places, "gpt2", [1, 2, 4.1], [3, 2, 1])
    assert of("H2").verdict == "not_reproduced"
    _ablation(places, "gpt2", [1, 2, 8], [3, 2, 1])
    assert of("H2").verdict == "reproduced"


@pytest.mark.parametrize(
    ("experiment", "metric", "id", "without"),
    [("thermal", "clock_loss", "G2", "none"), ("faults", "stall", "G3", "article")],
)
def test_a_cure_must_halve_a_trouble_that_shows(places: Path, experiment: str, metric: str, id: str, without: str) -> None:
    cure = {"G2": "regulated", "G3": "ours"}[id]
    for before, after, verdict in ((0, 0, "not_reproduced"), (50, 45, "partly"), (50, 0, "reproduced")):
        with recorder(places, experiment) as record:
            record.add(metric, before, "percent", variant=without)
            record.add(metric, after, "percent", variant=cure)
        assert of(id).verdict == verdict


def test_a_cpus_records_are_no_evidence_about_gpus(places: Path) -> None:
    with recorder(places, "prefill_vs_decode", "cpu-x86-64") as record:
        for metric in ("compute_utilization", "bandwidth_utilization"):
            record.add(metric, 50.0, "percent", model="m", phase="decode", batch=1, tokens=9, dtype="float32")
    v = of("A3", "cpu-x86-64")
    assert v.verdict == "not_measured"
    assert "CPU" in v.reason
    assert of("A2", "cpu-x86-64").verdict == "impossible"


def test_a_device_without_records_is_an_error_that_lists_the_others(places: Path) -> None:
    _steps(places, "decode", 1, 50)
    with pytest.raises(MeasurementError, match=GPU):
        claims.judge("nvidia-l4")


@pytest.mark.parametrize(
    "content",
    ["", "a,b\n", "id,section,claim,article,rule,experiment,figures\nA1,1,c,a,speedup,e,{half\n", "id,section\nA1,1\n"],
)
def test_a_broken_ledger_is_named(places: Path, content: str) -> None:
    path = places / "claims.csv"
    path.write_text(content)
    with pytest.raises(MeasurementError, match=r"claims\.csv"):
        claims.judge(path=path)


def test_an_unknown_rule_or_a_missing_figure_names_the_claim(places: Path) -> None:
    header = "id,section,claim,article,rule,experiment,figures\n"
    path = places / "claims.csv"
    for line in ("Z9,1,c,a,no_such_rule,e,{}\n", "Z9,1,c,a,speedup,e,{}\n"):
        path.write_text(header + line)
        with pytest.raises(MeasurementError, match="Z9"):
            claims.judge(path=path)


@pytest.mark.parametrize("junk", ["x", None, "100"])
def test_parameters_of_the_wrong_kind_name_the_claim_that_reads_them(places: Path, junk: Any) -> None:
    with recorder(places, "kv_allocators") as record:
        for concurrency in (junk, 50):
            for variant in ("paged", "contiguous_pool"):
                params = {"concurrency": concurrency, "workload": "azure_conversation"}
                record.add("throughput", 5.0, "req/s", variant=variant, params=params)
    if junk == "100":  # it still says a number
        assert of("C4").verdict == "not_reproduced"
    else:
        with pytest.raises(MeasurementError, match=r"claim C4.*'kv_allocators' on nvidia-h200"):
            claims.judge()


def test_an_ablation_of_somebodys_own_model_harms_no_claim(places: Path) -> None:
    _ablation(places, "me/my-model", [1.0, 4.0], [9.0, 1.0])
    assert of("H2").verdict == "not_measured"
    assert of("H1").verdict == "reproduced"


def test_a_gain_is_above_one_when_ours_is_better_whatever_the_unit() -> None:
    def row(value: float, unit: str) -> Row:
        return Row("r", "t", "e", "v", "m", unit, value, value, value, 1)

    assert Pair(row(1, "ms"), row(2, "ms")).gain == 2
    assert Pair(row(2, "tok/s"), row(1, "tok/s")).gain == 2


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1.3554, "ratio", "1.36x"), (72.4, "percent", "72.4 %"), (1.074e9, "bytes", "1.07 GB"), (3.441, "ms", "3.44 ms"),
        (19528, "count", "19,528"), (3.111e6, "ratio", "3,111,000x"), (-2.8, "percent", "-2.8 %"),
    ],
)  # fmt: skip
def test_a_value_is_written_as_people_write_it(value: float, unit: str, words: str) -> None:
    assert claims.said({"value": value, "unit": unit}) == words


def test_every_value_of_the_shipped_ledger_says_what_it_isof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the records that are shipped
    verdicts = [v for v in claims.judge() if v.ours]
    assert verdicts
    assert [v.id for v in verdicts if not v.what] == []
    text = claims.render(verdicts)
    assert " ratio" not in text
    assert "e+0" not in text


def test_whole_numbers_are_not_rounded(places: Path) -> None:
    row = Row("r", "t", "e", "v", "m", "count", 19528, 1, 1, 1)
    assert Evidence(GPU).value(row)["value"] == 19528
    assert Evidence(GPU).value(row, 1.23456)["value"] == 1.235


def test_the_ledger_for_people_names_every_claim() -> None:
    text = claims.render(claims.judge())
    assert all(f"{id:3} " in text for id in IDS)
    assert Evidence(GPU).rows("nothing", "recorded") == []
