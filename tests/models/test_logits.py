"""Both families give transformers' logits, however a prompt is cut into steps and wherever its KV lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding import Feeder, whole_logits
from tiny_models import SHAPES

from pdlab.models.catalogue import parameter_count
from pdlab.models.loading import load

TOKENS = [int(t) for t in torch.randint(0, 200, (137,), generator=torch.Generator().manual_seed(3))]
CLOSE = 1e-4  # float32 through two layers and sums of up to 137 terms: rounding gives about 1e-5
Folder = Callable[..., tuple[Path, Any]]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_argmax_match_transformers(folder: Folder, shape: str) -> None:
    path, theirs = folder(shape)
    ours = load(path).model
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits[0]
    got = whole_logits(ours, TOKENS)
    assert want.std() > 0.5, "weights too small to tell models apart"
    assert (got - want).abs().max() < CLOSE
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert parameter_count(ours.config) == sum(t.numel() for t in ours.tensors()) == theirs.num_parameters()


STEPS = {
    "token by token": [1] * 61,
    "chunks of 7": [7] * 8 + [5],
    "one, many, one": [1, 59, 1],
}


@pytest.mark.parametrize("page_size", [1, 3, 16, None], ids=["pages of 1", "pages of 3", "pages of 16", "extents"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shape", ["llama-gqa9to3-head24-untied-biases-llama3", "gpt2-tied"])
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(
    folder: Folder, shape: str, steps: str, page_size: int | None
) -> None:
    model = load(folder(shape)[0]).model
    tokens = TOKENS[:61]
    feeder = Feeder(model, page_size, 1, 70)
    got, at = [], 0
    for n in STEPS[steps]:
        got += feeder.step([(0, tokens[at : at + n])])
        at += n
    # float32 sums over 61 keys in another order
    torch.testing.assert_close(torch.cat(got), whole_logits(model, tokens), atol=2e-5, rtol=0)


@pytest.mark.parametrize("page_size", [1, 3, 16, None], ids=["pages of 1", "pages of 3", "pages of 16", "extents"])
@pytest.mark.parametrize("shape", ["llama-gqa9to3-head24-untied-biases-llama3", "qwen3-qk-norm-head24", "gpt2-tied"])
def test_neighbours_in_a_mixed_batch_do_not_change_logits(folder: Folder, shape: str, page_size: int | None) -> None:
    """Five prompts of odd lengths, decodes between prefill chunks, each against itself alone."""
    model = load(folder(shape)[0]).model
    prompts = [TOKENS[7 * i : 7 * i + n] for i, n in enumerate((41, 5, 23, 1, 66))]
    feeder = Feeder(model, page_size, len(prompts), 70)
    got: list[list[torch.Tensor]] = [[] for _ in prompts]
    sizes = ((9, 1, 1, 1, 30), (1, 1, 11, 0, 1), (1, 1, 1, 0, 1), (17, 1, 10, 0, 33), (13, 1, 0, 0, 1))
    for step in sizes:
        at = feeder.lengths
        work = [(i, p[at[i] : at[i] + n]) for i, (p, n) in enumerate(zip(prompts, step, strict=True)) if n]
        for (i, _), logits in zip(work, feeder.step(work), strict=True):
            got[i].append(logits)
    assert feeder.lengths == [len(p) for p in prompts]
    for prompt, parts in zip(prompts, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole_logits(model, prompt), atol=2e-5, rtol=0)


def test_a_neighbour_full_of_nan_leaves_the_others_alone(folder: Folder) -> None:
    model = load(folder("llama-mha-tied")[0]).model
    feeder = Feeder(model, 16, 2, 40)
    feeder.step([(0, TOKENS[:20]), (1, TOKENS[:33])])
    sick = feeder.slots(1, torch.arange(33))
    feeder.k[:, sick // 16, :, sick % 16] = torch.nan
    feeder.v[:, sick // 16, :, sick % 16] = torch.nan
    well, ill = feeder.step([(0, TOKENS[20:21]), (1, TOKENS[33:34])])
    assert ill.isnan().all()
    torch.testing.assert_close(well[0], whole_logits(model, TOKENS[:21])[-1], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.06), ("float16", 0.008)])
def test_16_bit_models_stay_near_float32(folder: Folder, dtype: str, share: float) -> None:
    """Error as a share of the logits' spread: 8 and 11 significant bits, over two layers of three roundings each."""
    path, _ = folder("llama-gqa9to3-head24-untied-biases-llama3")
    exact = whole_logits(load(path).model, TOKENS)
    model = load(path, dtype=dtype).model
    got = whole_logits(model, TOKENS)
    assert model.dtype == getattr(torch, dtype)
    assert got.dtype == torch.float32
    assert (got - exact).square().mean().sqrt() < share * exact.std()
