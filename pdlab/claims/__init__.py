"""The ledger of the article's claims: what was claimed, what was measured, and the verdict that a rule draws from both.

`data/claims.csv` holds one claim a line: its figures as JSON, the name of its rule, the experiment that
feeds it. A verdict is never written down anywhere: it is computed from recorded rows and from formulas each time.

    reproduced       the recorded numbers bear the claim out
    partly           the direction is right, the size is not; or it holds for some of what was measured
    not_reproduced   measured, and it is not so
    impossible       as stated, a roofline, Little's law or arithmetic forbids it, whatever is measured
    not_measured     no recorded rows that the rule needs

Ratios are judged on any GPU. Absolute milliseconds are the A100's and are held against its predicted roofline only.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.claims import attention, decode, gains, memory, phases
from pdlab.claims.evidence import Claim, Evidence, Rule
from pdlab.core.errors import MeasurementError
from pdlab.core.paths import data_dir
from pdlab.costs import tables

RULES: dict[str, Rule] = {
    name: rule
    for module in (phases, attention, memory, decode, gains)
    for name, rule in vars(module).items()
    if getattr(rule, "__module__", "") == module.__name__ and not name.startswith("_")
}

DEFAULT_DEVICE = "nvidia-h200"
VERDICTS = ("reproduced", "partly", "not_reproduced", "impossible", "not_measured")


@dataclass(frozen=True)
class Verdict:
    """One line of `pdlab claims`. `ours` is the value that decided, or None; `what` names it, for people."""

    id: str
    section: str
    claim: str
    article: str
    ours: dict[str, Any] | None
    verdict: str
    rule: str
    reason: str
    what: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The document of `pdlab claims --json`: every field but `what`, which the reason says at more length."""
        return {name: value for name, value in vars(self).items() if name != "what"}


def read_claims(path: Path | None = None) -> list[Claim]:
    """The lines of claims.csv; a broken one raises MeasurementError with its number."""
    path = path or data_dir() / "claims.csv"
    try:
        with path.open(newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f)
            if reader.fieldnames != list(Claim.__dataclass_fields__):
                raise MeasurementError(f"{path} does not start with the ledger's header", "restore it from git")
            claims = []
            for line in reader:
                figures = json.loads(line.pop("figures"))
                if not isinstance(figures, dict):
                    raise ValueError("figures is not a JSON object")
                claims.append(Claim(**line, figures=figures))
            return claims
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise MeasurementError(f"{path} cannot be read: {error}", "restore data/claims.csv from git") from error


def judge(
    device: str = DEFAULT_DEVICE, extra: Path | None = None, path: Path | None = None, ids: Sequence[str] | None = None
) -> list[Verdict]:
    """Every claim's verdict, or those of `ids` alone, from the records of `device` (and those under `extra`)."""
    tables.check_name(device, "device")
    if device not in tables.devices(extra) and device != DEFAULT_DEVICE:
        known = ", ".join(tables.devices(extra)) or "none yet"
        raise MeasurementError(f"nothing was recorded on {device!r}", f"devices with measurements: {known}")
    evidence = Evidence(device, extra)
    verdicts = []
    for claim in (c for c in read_claims(path) if ids is None or c.id in ids):
        rule = RULES.get(claim.rule)
        if rule is None:
            raise MeasurementError(f"claim {claim.id} names the rule {claim.rule!r}", f"rules: {', '.join(RULES)}")
        try:
            finding = rule(evidence, claim)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            lack = f"lack {error}" if isinstance(error, KeyError) else f"are not of the kind its rule reads ({error})"
            what = f"claim {claim.id}: its figures, or parameters recorded as {claim.experiment!r} on {device}, {lack}"
            raise MeasurementError(what, f"see the rule {claim.rule} in pdlab/claims") from error
        text = " ".join((rule.__doc__ or "").split())
        verdicts.append(
            Verdict(
                claim.id, claim.section, claim.claim, claim.article, finding.ours, finding.verdict,
                f"{claim.rule}: {text}", finding.reason, finding.what,
            )
        )  # fmt: skip
    return verdicts


def render(verdicts: list[Verdict]) -> str:
    """The ledger for people: one claim a paragraph."""
    lines = []
    for v in verdicts:
        value = ""
        if v.ours:
            where = f" on {v.ours['device']}" if v.ours["device"] else ""
            value = f" · ours {said(v.ours)}{_named(v)} ({v.ours['kind']}{where})"
        lines.append(f"{v.id:3} {v.verdict.replace('_', ' ').upper()}: {v.claim}")
        lines += [f"    article {v.article}{value}", f"    {v.reason}"]
    return "\n".join(lines)


def _named(verdict: Verdict) -> str:
    """What the value is of: after a comma, but for a count, which it completes."""
    if not verdict.what or not verdict.ours:
        return ""
    return ("" if verdict.ours["unit"] == "count" else ",") + f" {verdict.what}"


def said(ours: dict[str, Any]) -> str:
    """The `ours` of a verdict as people write it, three digits: 1.36x, 41.1 %, 1.07 GB, 3.44 ms, 19,528."""
    value, unit = (ours["value"] / 1e9, "GB") if ours["unit"] == "bytes" else (ours["value"], ours["unit"])
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number + {"ratio": "x", "percent": " %", "count": ""}.get(unit, f" {unit}")
