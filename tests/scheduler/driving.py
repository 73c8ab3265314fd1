"""An engine whose steps take one second each, whatever is in them, so that waits can be counted in steps."""

from pdlab.core.config import EngineConfig, SamplingParams
from pdlab.core.request import Request
from pdlab.costs.interface import Estimator
from pdlab.engine.engine import Engine
from pdlab.engine.simulated import SimulatedExecutor
from pdlab.models.catalogue import config_of

MODEL = config_of("llama-tiny")


class Guesses(Estimator):
    """Says of each request what the test told it to say: by number, else `seconds_per_token` of prompt and max_tokens."""

    def __init__(self, told=None, seconds_per_token=1.0):
        self.told, self.seconds_per_token = dict(told or {}), seconds_per_token

    def step_seconds(self, shape):
        return 1.0

    def remaining(self, request: Request) -> float:
        return self.remaining_if(request, request.params.max_tokens - len(request.output_token_ids))

    def remaining_if(self, request, more):
        own = self.seconds_per_token * (request.num_tokens - request.num_computed + more)
        return self.told.get(request.request_id, own)

    def observe(self, row, shape=None, launch_s=0.0):
        return None

    def save(self, path):
        return None

    def load(self, path):
        return None


def make_engine(estimator=None, capacity=4096, step_s=1.0, **fields) -> Engine:
    fields = {"page_size": 4, "max_batch_tokens": 16, "max_batch_requests": 4, "executor": "simulated", **fields}
    config = EngineConfig(kv_capacity_tokens=capacity, **fields)
    executor = SimulatedExecutor(MODEL, lambda shape: step_s, capacity, steps_in_flight=config.steps_in_flight)
    return Engine(config, MODEL, executor, estimator or Guesses())


def add(engine: Engine, prompt: int, output: int, **more) -> Request:
    return engine.add([1] * prompt, SamplingParams(max_tokens=output, ignore_eos=True), **more)


def run(engine: Engine, most: int = 100_000) -> None:
    """Steps until the engine is idle; gives up what would never run."""
    for _ in range(most):
        if engine.idle:
            return
        engine.step()
        if engine.stuck:
            engine.give_up()
    raise AssertionError(f"still busy after {most} steps")
