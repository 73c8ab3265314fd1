"""Who runs next: the policies, and what each promises about waiting.

A policy sees the requests that wait and those that run, and answers in which order to admit the first and to give up the
second. It holds no queue. How many tokens each request gets in a step is batching's concern.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.core.config import EngineConfig
from pdlab.core.errors import ConfigError
from pdlab.core.request import Request
from pdlab.costs.interface import Estimator
from pdlab.scheduler.interface import Policy


def _arrival(request: Request) -> tuple[float, int]:
    """First come, first served; equal arrivals keep the order of their numbers, so no two keys are ever equal."""
    return request.arrival_s, request.request_id


class FirstComeFirstServed(Policy):
    """Admits in order of arrival; the last to arrive is the first to give up its memory.

    Promise: nobody who arrived later is admitted earlier, so a wait is bounded by the work of those already there.
    """

    name = "fcfs"

    def order(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, estimator: Estimator
    ) -> tuple[list[Request], list[Request]]:
        return sorted(waiting, key=_arrival), sorted(running, key=_arrival, reverse=True)


POLICY_CLASSES: dict[str, type[Policy]] = {FirstComeFirstServed.name: FirstComeFirstServed}


def make_policy(config: EngineConfig) -> Policy:
    """The policy that `config.policy` names."""
    if config.policy not in POLICY_CLASSES:
        raise ConfigError(f"policy={config.policy!r} is not built", f"choose one of: {', '.join(sorted(POLICY_CLASSES))}")
    return POLICY_CLASSES[config.policy]()
