"""index.html: the ledger first, the machine, the notebooks, and two devices side by side where both were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdlab import claims
from pdlab.bench.records import Recorder
from pdlab.core.errors import MeasurementError
from pdlab.runner import report

MACHINE = {
    "name": "CPU & <co>",
    "slug": "cpu-test",
    "device": "cpu",
    "profile": "smoke",
    "memory_bytes": 2**33,
    "dtype": "float32",
}
ROW = {
    "notebook": "notebooks/01_a note.ipynb", "params": {"n": 3}, "profile": "smoke", "key": "k", "status": "ok",
    "seconds": 12.3, "peak_memory_bytes": 2**28, "error": None, "output": "01_a note-k.ipynb",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "measurements"


def written(out: Path, *rows: dict[str, Any]) -> str:
    return report.write(out, MACHINE, list(rows)).read_text(encoding="utf-8")


def test_the_ledger_comes_first_with_every_claim(tmp_path: Path) -> None:
    page = written(tmp_path, ROW)
    sections = re.findall(r"<section id='(\w+)'>", page)
    assert sections[:3] == ["claims", "machine", "notebooks"]
    for verdict in claims.judge():
        assert f"id='claim-{verdict.to_dict()['id']}'" in page


def test_a_run_has_its_status_time_memory_settings_and_links(tmp_path: Path) -> None:
    page = written(
        tmp_path, ROW, ROW | {"key": "l", "status": "died", "error": "killed <b>", "output": None, "peak_memory_bytes": None}
    )
    assert "href='01_a%20note-k.html'" in page
    for text in (
        "12.3 s",
        "256 MiB",
        "n=3",
        "badge good'>ok",
        "badge bad'>died",
        "killed &lt;b&gt;",
        "CPU &amp; &lt;co&gt;",
        "1 ok, 1 died",
    ):
        assert text in page, text
    assert page.count("id='01_a note'") == 1, "one anchor, though it ran twice"


def test_a_ledger_that_cannot_be_read_costs_only_its_own_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> None:
        raise MeasurementError("claims.csv is broken", "restore it")

    monkeypatch.setattr(claims, "judge", fail)
    page = written(tmp_path, ROW)
    assert "claims.csv is broken; restore it" in page
    assert "12.3 s" in page


@pytest.mark.parametrize("both", [True, False])
def test_two_devices_are_compared_where_both_were_measured(tmp_path: Path, own_measurements: Path, both: bool) -> None:
    for device, rate in [("cpu-test", 0.04), *([(report.REFERENCE, 4.0)] if both else [])]:
        with Recorder("made_up", device, out=own_measurements) as recorder:
            recorder.add("read_back", rate, "TB/s", params={"n": 7})
            recorder.add("floor_read_back", 2 * rate, "TB/s", params={"n": 7})
    page = written(tmp_path, ROW)
    assert ("<section id='devices'>" in page) == both
    if both:
        row = re.search(r"<tr><td[^>]*>made_up read_back.*?</tr>", page)
        assert row
        assert [text in row[0] for text in ("4 TB/s (50 %)", "0.04 TB/s (50 %)", ">0.01<")] == [True] * 3
        assert "<circle" in page.split("<section id='devices'>")[1]


def test_the_report_is_written_again_from_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(json.dumps([ROW]))
    assert report.main([str(tmp_path)]) == 0
    assert "12.3 s" in (tmp_path / "index.html").read_text()
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "run one first: make run" in capsys.readouterr().err
