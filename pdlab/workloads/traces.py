"""Recorded arrivals, replayed: Azure's CSV files and Mooncake's JSON lines.

The files are not part of this project. Where to get them:

- Azure LLM inference traces (CC-BY-4.0; Patel et al., Splitwise, ISCA 2024): the `data/` folder of the GitHub repository
  Azure/AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv` and `AzureLLMInferenceTrace_code.csv`.
  Columns TIMESTAMP,ContextTokens,GeneratedTokens.
- Mooncake traces (Qin et al., FAST 2025): the `FAST25-release/traces/` folder of kvcache-ai/Mooncake. One JSON object a
  line: timestamp (ms), input_length, output_length, hash_ids (one per block of 512 prompt tokens; equal ids, equal text).

Without the files, `generators.azure_conversation` and `azure_code` imitate the first two.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pdlab.core.errors import WorkloadError
from pdlab.workloads.workload import Item, Workload

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOONCAKE_BLOCK = 512


def _broken(path: Path, line: int, what: str, right: str) -> WorkloadError:
    return WorkloadError(f"{path.name}, line {line}: {what}", right)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as f:
            number = 0
            try:
                for number, line in enumerate(f, start=1):
                    yield number, line
            except UnicodeDecodeError as e:
                raise _broken(path, number + 1, f"not UTF-8 text ({e.reason})", "use the file as it was published") from e
    except OSError as e:
        raise WorkloadError(
            f"{path} cannot be read ({e.strerror})", "give the path of a trace file; see pdlab.workloads.traces"
        ) from e


def _tokens(path: Path, line: int, name: str, value: object) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise _broken(path, line, f"{name} is {value!r}", "a whole number of tokens, 1 or more, is expected")
    return number


def _cut(items: Iterator[tuple[int, Item]], path: Path, limit: int | None, longest: int | None) -> list[Item]:
    """Collects items whose time never falls; drops what is longer than `longest`."""
    out: list[Item] = []
    last = 0.0
    for line, item in items:
        if item.arrival_s < last:
            raise _broken(
                path, line, f"time falls from {last:.6f} s to {item.arrival_s:.6f} s after the start", "sort it by time"
            )
        last = item.arrival_s
        if longest is None or item.prompt_tokens + item.max_tokens <= longest:
            out.append(item)
        if limit is not None and len(out) >= limit:
            break
    if not out:
        raise WorkloadError(f"{path.name} holds no request", "a header line and at least one row are expected")
    return out


def _azure_rows(path: Path, kind: str) -> Iterator[tuple[int, Item]]:
    start: datetime | None = None
    for line, text in _lines(path):
        row = next(csv.reader([text]), [])
        if line == 1:
            if [c.strip() for c in row] != AZURE_COLUMNS:
                raise _broken(path, 1, f"the header is {text.strip()!r}", f"{','.join(AZURE_COLUMNS)} is expected")
            continue
        if not row:
            continue
        if len(row) != 3:
            raise _broken(path, line, f"{len(row)} fields", "three are expected; the file may be cut short")
        try:
            when = datetime.fromisoformat(row[0].strip())
            start = start or when
            seconds = (when - start).total_seconds()
        except (ValueError, TypeError) as e:
            raise _broken(path, line, f"TIMESTAMP is {row[0]!r}", "a time like 2023-11-16 18:17:03.9799600 is expected") from e
        context, generated = _tokens(path, line, AZURE_COLUMNS[1], row[1]), _tokens(path, line, AZURE_COLUMNS[2], row[2])
        if seconds < 0:
            raise _broken(path, line, f"time falls to {-seconds:.6f} s before the first row", "sort it by time")
        yield line, Item(seconds, prompt_tokens=context, max_tokens=generated, kind=kind)


def azure(path: str | Path, *, limit: int | None = None, longest: int | None = None, kind: str | None = None) -> Workload:
    """An Azure-format CSV file. `limit`: the first so many requests; `longest`: drops those of more tokens in all."""
    path = Path(path)
    items = _azure_rows(path, kind or ("code" if "code" in path.stem else "conversation"))
    return Workload(path.stem, _cut(items, path, limit, longest))


def _mooncake_rows(path: Path, kind: str) -> Iterator[tuple[int, Item]]:
    start: float | None = None
    for line, text in _lines(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as e:
            raise _broken(path, line, f"not JSON ({e})", "one object a line is expected; the file may be cut short") from e
        if not isinstance(row, dict) or not {"timestamp", "input_length", "output_length"} <= row.keys():
            raise _broken(path, line, "fields are missing", "timestamp, input_length, output_length, hash_ids are expected")
        when, hashes = row["timestamp"], row.get("hash_ids", [])
        if not isinstance(when, int | float) or isinstance(when, bool) or not 0 <= when < float("inf"):
            raise _broken(path, line, f"timestamp is {when!r}", "milliseconds, 0 or more, are expected")
        prompt = _tokens(path, line, "input_length", row["input_length"])
        output = _tokens(path, line, "output_length", row["output_length"])
        if not (isinstance(hashes, list) and all(isinstance(h, int) and not isinstance(h, bool) and h >= 0 for h in hashes)):
            raise _broken(path, line, f"hash_ids is {str(hashes)[:40]}", "a list of whole numbers, 0 or more, is expected")
        start = when if start is None else start
        blocks = hashes[: prompt // MOONCAKE_BLOCK]  # a last, partial block is the request's own
        pieces = tuple((h, MOONCAKE_BLOCK) for h in blocks)
        yield line, Item(max(0.0, (when - start) / 1e3), prompt_tokens=prompt, max_tokens=output, kind=kind, pieces=pieces)


def mooncake(path: str | Path, *, limit: int | None = None, longest: int | None = None, kind: str = "mooncake") -> Workload:
    """A Mooncake-format JSON-lines file; prompts with equal hash_ids share those 512-token blocks."""
    path = Path(path)
    return Workload(path.stem, _cut(_mooncake_rows(path, kind), path, limit, longest))
