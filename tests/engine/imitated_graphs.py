"""What graphs do, imitated on a CPU: a capture keeps the step, and a replay runs it again over the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.engine import executor as executor_module
from pdlab.llm import LLM


class Again:
    """What a captured graph does, done by running the step once more."""

    def __init__(self, step: Callable[[], torch.Tensor], out: torch.Tensor) -> None:
        self.step, self.out = step, out

    def replay(self) -> None:
        self.out.copy_(self.step())


class ImitatedCapture:
    """Counts captures and replays. A real capture does not run the step, so what it changes is put back."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.captures: list[Again] = []
        self.fail_after = fail_after
        self.executor: Any = None

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Again, torch.Tensor]:
        if self.fail_after is not None and len(self.captures) >= self.fail_after:
            raise RuntimeError("out of memory, say")
        e = self.executor
        state = [t for t in (e.last, e.k, e.v, e.host_tokens) if t is not None]
        kept = [t.clone() for t in state]
        again = Again(step, step())
        for tensor, before in zip(state, kept):
            tensor.copy_(before)
        self.captures.append(again)
        return again, again.out


def outputs(
    capture: ImitatedCapture | None, prompts: list[list[int]], params: list[SamplingParams], monkeypatch: Any, **config: Any
) -> list[list[int]]:
    """Token ids of every request, on llama-tiny in float32."""
    real = executor_module.TorchExecutor

    def make(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs, capture=capture)
        if capture is not None:
            capture.executor = made
        return made

    monkeypatch.setattr(executor_module, "TorchExecutor", make)
    settings = {"device": "cpu", "max_batch_requests": 12, "kv_capacity_tokens": 4096, "max_model_len": 256} | config
    with LLM(
        config.pop("model", "random:llama-tiny"), EngineConfig().with_(**{k: v for k, v in settings.items() if k != "model"})
    ) as llm:
        return [r.token_ids for r in llm.generate(prompts, params)]


def mixed(n: int = 9, **more: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of many lengths, so that the batch grows, shrinks and passes several padded sizes."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 250, int(k)).tolist() for k in rng.integers(1, 40, n)]
    return prompts, [SamplingParams(max_tokens=3 + 5 * i, ignore_eos=True, **more) for i in range(n)]
