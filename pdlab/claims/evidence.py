"""What a rule of the ledger works with: a claim, the recorded rows of one device, and the form of its answer.

A rule is a function of an Evidence and a Claim; its docstring is printed beside its verdict. Thresholds come from the
claim's figures; the constants here say what counts as the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdlab.costs import tables
from pdlab.costs.tables import Row, params_json

NOISE = 0.03  # two measurements closer than this are the same


@dataclass(frozen=True)
class Claim:
    """One line of claims.csv."""

    id: str
    section: str
    claim: str
    article: str  # the figure as the article prints it
    rule: str  # name of a function in this package
    experiment: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What a rule answers. `what` names the value in `ours`, since a number and a unit alone do not say of what."""

    verdict: str
    reason: str
    ours: dict[str, Any] | None = None
    what: str = ""


@dataclass(frozen=True)
class Pair:
    """A variant's row and its baseline's, of the same run and with the same parameters."""

    ours: Row
    base: Row

    @property
    def params(self) -> dict[str, Any]:
        return self.ours.params

    @property
    def gain(self) -> float:
        """How many times better: time of the baseline over ours, or rate of ours over the baseline's."""
        a, b = self.ours.median, self.base.median
        return b / a if self.ours.unit in ("ms", "us") else a / b


class Evidence:
    """The recorded rows of one device. A row counts if it is the newest ok one of its key; measured before simulated.

    A CPU has none: the claims are about GPUs, so what a CPU measured neither bears them out nor refutes them.
    """

    def __init__(self, device: str, extra: Path | None = None) -> None:
        self.device, self.extra = device, extra
        self._cache: dict[str, list[Row]] = {}

    def all(self, experiment: str) -> list[Row]:
        if experiment not in self._cache:
            found = [] if self.device.startswith("cpu") else tables.read(self.device, experiment, self.extra)
            self._cache[experiment] = [r for r in found if r.ok]
        return self._cache[experiment]

    def rows(self, experiment: str, metric: str, variant: str | None = None, **where: Any) -> list[Row]:
        """Newest rows of a metric, of measured ones only if there are any, else simulated ones."""
        found = [
            r
            for r in tables.newest(self.all(experiment))
            if r.metric == metric
            and (variant is None or r.variant == variant)
            and all(r.params.get(k) == v for k, v in where.items())
            and r.kind != "predicted"
        ]
        return [r for r in found if r.kind == "measured"] or found

    def pairs(
        self, experiment: str, metric: str, variants: list[str], baselines: list[str], where: dict[str, Any] | None = None
    ) -> list[Pair]:
        """For each set of parameters the newest run that holds both sides; of several variants the best, of baselines the
        first listed. Measured pairs only if there are any."""
        runs: dict[tuple[str, str, str], dict[str, Row]] = {}
        for r in self.all(experiment):
            if r.metric == metric and r.kind != "predicted" and all(r.params.get(k) == v for k, v in (where or {}).items()):
                runs.setdefault((params_json(r.params), r.kind, r.run_id), {})[r.variant] = r
        newest: dict[tuple[str, str], Pair] = {}
        for (params, kind, _), by_variant in runs.items():
            base = next((by_variant[b] for b in baselines if b in by_variant), None)
            both = [(by_variant[v], base) for v in variants if base and v in by_variant]
            mine = [Pair(a, b) for a, b in both if a.median > 0 and b.median > 0]
            if mine:
                newest[params, kind] = max(mine, key=lambda p: p.gain)
        found = list(newest.values())
        return [p for p in found if p.ours.kind == "measured"] or found

    def value(self, row: Row, value: float | None = None, unit: str | None = None) -> dict[str, Any]:
        """The `ours` of a verdict, drawn from a row. Whole numbers stay as they are, others keep four digits."""
        value = row.median if value is None else value
        return {
            "value": float(value) if float(value).is_integer() else float(f"{value:.4g}"),
            "unit": unit or row.unit,
            "kind": row.kind,
            "device": self.device,
            "provenance_id": row.provenance_id,
        }


Rule = Callable[[Evidence, Claim], Finding]


def at(row: Row) -> tuple[Any, ...]:
    """Run and parameters: what two metrics of one measurement share."""
    return (row.run_id, params_json(row.params))


def predicted(value: float, unit: str, device: str | None) -> dict[str, Any]:
    """The `ours` of a verdict that rests on formulas alone."""
    return {"value": float(f"{value:.4g}"), "unit": unit, "kind": "predicted", "device": device, "provenance_id": None}


def not_measured(claim: Claim, evidence: Evidence, what: str, note: str = "", ours: Any = None, named: str = "") -> Finding:
    """The verdict where the rows that a rule needs were never recorded. `named`: what `ours` is, where something is known."""
    where = (
        "a CPU's records are not evidence about GPUs"
        if evidence.device.startswith("cpu")
        else f"{evidence.device} has no record of {what}"
    )
    there = find_spec(f"pdlab.bench.{claim.experiment}") is not None
    on = " on a GPU" if evidence.device.startswith("cpu") else ""
    reason = f"{where}; {f'pdlab bench {claim.experiment} --record{on} measures it' if there else 'no suite measures it yet'}"
    return Finding("not_measured", f"{reason}. {note}".rstrip(". ") if note else reason, ours, named)


def graded(value: float, claimed: float) -> str:
    """A gain against the claimed one: reproduced from claimed on (less noise), partly if there is a gain at all."""
    return "reproduced" if value >= claimed * (1 - NOISE) else "partly" if value > 1 + NOISE else "not_reproduced"


def middle(pairs: list[Pair]) -> Pair:
    return sorted(pairs, key=lambda p: p.gain)[(len(pairs) - 1) // 2]


def gain_range(pairs: list[Pair]) -> str:
    gains = sorted(p.gain for p in pairs)
    if len(gains) == 1:
        return "one shape"
    return f"{gains[0]:.2f}x to {gains[-1]:.2f}x over {len(gains)} shapes"
