"""Tables survive concurrent writers, crashes and odd inputs, and say where they are broken."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.bench import records
from pdlab.bench.records import Recorder, Row, write_rows
from pdlab.core.errors import MeasurementError
from pdlab.costs import tables
from pdlab.hardware.timing import Timings

PROVENANCE = {"p": {"gpu": None}}
FORMAT = "run_id,time_utc,experiment,variant,params,metric,unit,median,p10,p90,n,kind,status,provenance_id"
PROVENANCE_KEYS = {
    "gpu", "driver", "torch", "triton", "python", "commit", "clocks", "temperature", "power", "throttle", "seed",
    "time_utc", "command",
}  # fmt: skip


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (tables, records):
        monkeypatch.setattr(module, "data_dir", lambda: tmp_path / "data")
        monkeypatch.setattr(module, "home_dir", lambda: tmp_path / "home")
    return tmp_path


def _row(value: float = 1.5, **changes: object) -> Row:
    base: dict[str, object] = {
        "run_id": "r", "time_utc": "2026-01-01T00:00:00Z", "experiment": "e", "variant": "ours", "metric": "latency",
        "unit": "ms", "median": value, "p10": value, "p90": value, "n": 3, "provenance_id": "p",
    }  # fmt: skip
    return Row(**(base | changes))  # type: ignore[arg-type]


def test_the_columns_are_the_format() -> None:
    assert ",".join(tables.COLUMNS) == FORMAT


names = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), min_size=1).filter(lambda s: s.strip())
params = st.dictionaries(names, st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(-1e9, 1e9), names, st.none()))


@given(params, names, st.floats(1e-6, 1e9))
def test_rows_read_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, params: dict[str, object], variant: str, value: float
) -> None:
    root = tmp_path_factory.mktemp("m")
    row = _row(value, params=params, variant=variant)
    (path,) = write_rows(root, "cpu-x86-64", [row], PROVENANCE)
    (back,) = tables.read_file(path)
    assert back.params == row.params
    assert back.variant == variant
    assert back.median == pytest.approx(value, rel=1e-5)  # six digits are kept


def test_parameters_are_compact_json_with_sorted_keys(tmp_path: Path) -> None:
    row = _row(params={"quantile": 50, "causal": True, "load": 0.9, "dtype": "bfloat16"})
    (path,) = write_rows(tmp_path, "d", [row], PROVENANCE)
    with path.open(newline="") as f:
        line = next(csv.DictReader(f))
    assert line["params"] == '{"causal":true,"dtype":"bfloat16","load":0.9,"quantile":50}'


def test_whole_numbers_stay_whole() -> None:
    assert _row(8589934592.0).cells()[7] == "8589934592"
    assert _row(0.123456789).cells()[7] == "0.123457"


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "guessed"},
        {"unit": "seconds"},
        {"status": "fine"},
        {"status": "skipped:"},
        {"median": math.nan},
        {"median": math.inf, "p90": math.inf},
        {"p10": 2.0},
        {"n": -1},
        {"experiment": "../escape"},
        {"metric": " "},
        {"params": {"shape": [1, 2]}},
        {"params": {"load": math.nan}},
    ],
    ids=str,
)
def test_a_row_that_breaks_the_format_is_refused_and_nothing_is_written(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(MeasurementError) as error:
        write_rows(tmp_path, "d", [_row(), _row(**changes)], PROVENANCE)
    assert error.value.hint
    assert not list(tmp_path.rglob("*.csv"))


def test_a_row_without_provenance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no provenance for 'p'"):
        write_rows(tmp_path, "d", [_row()], {})
    assert not list(tmp_path.rglob("*.csv"))


def test_writing_appends_and_keeps_every_older_byte(tmp_path: Path) -> None:
    (path,) = write_rows(tmp_path, "d", [_row(1)], PROVENANCE)
    before = path.read_bytes()
    write_rows(tmp_path, "d", [_row(2)], {"q": {}})
    assert path.read_bytes().startswith(before)
    assert [r.median for r in tables.read_file(path)] == [1, 2]
    assert set(json.loads((path.parent / "provenance.json").read_text())) == {"p", "q"}
    assert sorted(p.name for p in path.parent.iterdir()) == ["e.csv", "provenance.json"]  # no lock, no temporary file


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from pdlab.bench.records import Row, write_rows
root, who = Path(sys.argv[1]), sys.argv[2]
for i in range(15):
    row = Row(who, "2026-01-01T00:00:00Z", "e", "ours", "m", "ms", i, i, i, 1, provenance_id=f"{who}-{i}", params={"i": i})
    write_rows(root, "d", [row], {f"{who}-{i}": {}})
"""
    workers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), f"w{w}"]) for w in range(4)]
    assert [w.wait(120) for w in workers] == [0] * 4
    rows = tables.read_file(tmp_path / "d" / "e.csv")
    assert sorted((r.run_id, r.params["i"]) for r in rows) == [(f"w{w}", i) for w in range(4) for i in range(15)]
    assert len(json.loads((tmp_path / "d" / "provenance.json").read_text())) == 60


def test_a_write_that_fails_halfway_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write_rows(tmp_path, "d", [_row(1)], PROVENANCE)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MeasurementError, match=r"cannot be written.*No space"):
        write_rows(tmp_path, "d", [_row(2)], PROVENANCE)
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["e.csv", "provenance.json"]


_HEADER = ",".join(tables.COLUMNS) + "\n"
_START = "r,2026-01-01T00:00:00Z,e,ours,"
BROKEN = {
    "no header": "a,b,c\n1,2,3\n",
    "empty": "",
    "too few cells": _HEADER + _START + "\n",
    "params are not JSON": _HEADER + _START + "{x},m,ms,1,1,1,3,measured,ok,p\n",
    "params are a list": _HEADER + _START + "[1],m,ms,1,1,1,3,measured,ok,p\n",
    "params hold a list": _HEADER + _START + '"{""a"":[1]}",m,ms,1,1,1,3,measured,ok,p\n',
    "params hold what JSON has not": _HEADER + _START + '"{""a"":NaN}",m,ms,1,1,1,3,measured,ok,p\n',
    "params name a key twice": _HEADER + _START + '"{""a"":1,""a"":2}",m,ms,1,1,1,3,measured,ok,p\n',
    "a word for a number": _HEADER + _START + "{},m,ms,fast,1,1,3,measured,ok,p\n",
    "a number as Python writes it": _HEADER + _START + "{},m,ms,1_0,1,20,3,measured,ok,p\n",
    "a count as Python writes it": _HEADER + _START + "{},m,ms,1,1,1,1_000,measured,ok,p\n",
    "no reason for a skip": _HEADER + _START + "{},m,ms,,,,0,measured,skipped: ,p\n",
    "a time in words": _HEADER + "r,yesterday,e,ours,{},m,ms,1,1,1,3,measured,ok,p\n",
    "a row of another table": _HEADER + "r,2026-01-01T00:00:00Z,f,ours,{},m,ms,1,1,1,3,measured,ok,p\n",
    "an unknown unit": _HEADER + _START + "{},m,furlongs,1,1,1,3,measured,ok,p\n",
    "an open quote": _HEADER + _START + '"{},m,ms,1,1,1,3,measured,ok,p\n',
    "cut off in the middle": _HEADER + _START + "{},m,ms,1,1,1,3,measured,ok,p\nr,2026-01-01T",
    "not text": None,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_table_names_its_file_and_never_reads_as_fewer_rows(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "e.csv"
    path.write_text(_HEADER + _START + "{},m,ms,1,1,1,3,measured,ok,p\n")
    assert len(tables.read_file(path)) == 1  # what each of the others breaks
    path.write_bytes(b"\xff\xfe\x00\x81" if content is None else content.encode())
    with pytest.raises(MeasurementError, match=r"e\.csv"):
        tables.read_file(path)


def test_a_table_that_cannot_be_read_or_written_is_named(tmp_path: Path, places: Path) -> None:
    folder = places / "data" / "measurements" / "d"
    (folder / "e.csv").mkdir(parents=True)
    with pytest.raises(MeasurementError, match=r"e\.csv"):
        tables.read("d", "e")
    with pytest.raises(MeasurementError, match="cannot be written"):
        write_rows(folder.parent, "d", [_row()], PROVENANCE)
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasurementError, match="cannot be written"):
        write_rows(tmp_path / "file", "d", [_row()], PROVENANCE)


def _breaks_of_format(table: Path) -> list[str]:
    """What FORMATS says of a table, checked without this package's own reader."""
    known = json.loads((table.parent / "provenance.json").read_text(encoding="utf-8"))
    units = ["ms", "us", "tok/s", "req/s", "TB/s", "TFLOP/s", "bytes", "ratio", "percent", "count"]
    with table.open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file, strict=True)
    breaks = [] if header == FORMAT.split(",") else ["header"]
    for number, line in enumerate(lines, 2):
        row = dict(zip(header, line, strict=True))
        params = json.loads(row["params"])
        words = [v for v in params.values() if isinstance(v, str)]
        right = {
            "time_utc": re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["time_utc"]),
            "experiment": row["experiment"] == table.stem,
            "params": row["params"] == json.dumps(params, sort_keys=True, separators=(",", ":"), ensure_ascii=False),
            "a number as text": not any(re.fullmatch(r"[-\d.]+|[Tt]rue|[Ff]alse", word) for word in words),
            "model": not str(params.get("model")).startswith("random:"),
            "quantile": params.get("quantile", 50) in (50, 90, 99),
            "unit": row["unit"] in units,
            "kind": row["kind"] in ("measured", "simulated", "predicted"),
            "status": re.fullmatch(r"ok|throttled|skipped:.+", row["status"]),
            "provenance": set(known.get(row["provenance_id"], {})) >= PROVENANCE_KEYS,
            "commit": re.fullmatch(r"[0-9a-f]{40}(\+changes)?", str(known.get(row["provenance_id"], {}).get("commit"))),
        }
        if not row["status"].startswith("skipped:"):
            low, middle, high = (float(row[name]) for name in ("p10", "median", "p90"))
            right["quantiles"] = math.isfinite(low) and low <= middle <= high < math.inf and int(row["n"]) > 0
        breaks += [f"{table.name}:{number}: {name}" for name, ok in right.items() if not ok]
    return breaks


def test_every_recorded_table_keeps_the_format(repository: Path) -> None:
    found = sorted((repository / "data" / "measurements").glob("*/*.csv"))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", path.parent.name) for path in found)
    assert [line for path in found for line in _breaks_of_format(path)] == []


def test_nothing_is_appended_to_a_table_with_another_header(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "e.csv").write_text("a,b\n")
    with pytest.raises(MeasurementError, match="header"):
        write_rows(tmp_path, "d", [_row()], PROVENANCE)
    assert (tmp_path / "d" / "e.csv").read_text() == "a,b\n"


def test_a_broken_provenance_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "provenance.json").write_text("{half")
    with pytest.raises(MeasurementError, match="provenance"):
        write_rows(tmp_path, "d", [_row()], PROVENANCE)
    assert (tmp_path / "d" / "provenance.json").read_text() == "{half"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a..b"])
def test_a_device_or_experiment_never_becomes_another_path(name: str) -> None:
    with pytest.raises(MeasurementError):
        tables.read(name, "ceilings")
    with pytest.raises(MeasurementError):
        tables.read("cpu-x86-64", name)


def test_the_users_rows_replace_shipped_ones_of_the_same_key_only(places: Path) -> None:
    write_rows(places / "data" / "measurements", "d", [_row(1, params={"n": 1}), _row(2, params={"n": 2})], PROVENANCE)
    write_rows(places / "home" / "measurements", "d", [_row(9, params={"n": 1})], PROVENANCE)
    counted = records.latest("d", "e")
    assert dict(zip(counted["param_n"], counted["median"])) == {1: 9, 2: 2}
    assert len(records.read_rows("d", "e")) == 3
    assert records.latest("d", "e", n=2)["median"].tolist() == [2]
    assert records.latest("d", "nothing").empty


def test_running_writes_under_runs_and_recording_under_data(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "checkout_dir", lambda: places)
    assert records.target_root() == places / "runs" / "measurements"
    assert records.target_root(record=True) == places / "data" / "measurements"
    monkeypatch.setattr(records, "checkout_dir", lambda: None)
    monkeypatch.chdir(places)
    assert records.target_root() == places / "runs" / "measurements"
    assert records.target_root(record=True) == places / "home" / "measurements"  # an installed package is not written to


def test_the_commit_comes_from_git_or_else_from_the_environment(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "checkout_dir", lambda: places)
    monkeypatch.setenv("PDLAB_COMMIT", "abc123")
    assert records.commit_id() == "abc123"
    monkeypatch.delenv("PDLAB_COMMIT")
    assert records.commit_id() == "unknown"
    git = ["git", "-C", str(places), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", str(places)], check=True)
    (places / "pdlab").mkdir()
    (places / "pdlab" / "x.py").write_text("1\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    monkeypatch.setenv("PDLAB_COMMIT", "ignored inside a checkout")
    clean = records.commit_id()
    assert len(clean) == 40
    (places / "pdlab" / "x.py").write_text("2\n")
    assert records.commit_id() == clean + "+changes"


def test_a_recorder_writes_what_it_has_even_when_the_run_is_cut_short(tmp_path: Path) -> None:
    def cut_short() -> None:
        with Recorder("e", "cpu-x86-64", out=tmp_path, seed=7, command="test") as record:
            record.add("latency", Timings(2, 1, 3, 5), model="random:llama-1b", batch=4)
            record.add("throughput", 3.0, "tok/s", variant="article", kind="simulated", settings={"tile": 64})
            record.skip("latency", "ms", "out of\n memory", model="llama-3-8b")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short()
    rows = tables.read_file(tmp_path / "cpu-x86-64" / "e.csv")
    assert rows[0].params == {"batch": 4, "model": "llama-1b"}
    assert (rows[0].median, rows[0].p10, rows[0].p90, rows[0].n) == (2, 1, 3, 5)
    assert rows[2].status == "skipped:out of memory"
    assert not rows[2].ok
    assert math.isnan(rows[2].median)
    assert len({r.run_id for r in rows}) == 1
    provenance = json.loads((tmp_path / "cpu-x86-64" / "provenance.json").read_text())
    assert all(set(p) >= PROVENANCE_KEYS for p in provenance.values())
    assert provenance[rows[1].provenance_id]["settings"] == {"tile": 64}
    assert "settings" not in provenance[rows[0].provenance_id]
    assert provenance[rows[0].provenance_id]["seed"] == 7


def test_flushing_twice_writes_each_row_once(tmp_path: Path) -> None:
    record = Recorder("e", "cpu-x86-64", out=tmp_path)
    record.add("latency", 1.0, "ms")
    record.flush()
    record.flush()
    record.add("latency", 2.0, "ms")
    assert record.flush() == [tmp_path / "cpu-x86-64" / "e.csv"]
    assert [r.median for r in tables.read_file(tmp_path / "cpu-x86-64" / "e.csv")] == [1, 2]


def test_a_throttled_timing_is_marked_and_does_not_count(tmp_path: Path) -> None:
    with Recorder("e", "cpu-x86-64", out=tmp_path) as record:
        record.add("latency", 1.0, "ms")
        record.add("latency", Timings(9, 9, 9, 3, throttled=True))
    assert [r.status for r in tables.read("cpu-x86-64", "e", tmp_path)] == ["ok", "throttled"]
    assert [r.median for r in tables.newest(tables.read("cpu-x86-64", "e", tmp_path))] == [1]
    assert records.provenance_of("cpu-x86-64", record.rows[0].provenance_id, tmp_path) is not None
    assert records.provenance_of("cpu-x86-64", "nobody", tmp_path) is None
