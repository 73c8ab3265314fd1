"""Decoding by Hugging Face transformers as it comes: generate(), eager, random weights of the same shape.

The time of an answer less that of its prompt alone; a few tokens from the middle of the answer, since it takes long.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pdlab.hardware.probe import Machine
    from pdlab.models.config import ModelConfig
    from pdlab.models.loading import Loaded

SECONDS = 15.0  # with less left it is not begun
NEW = 16  # tokens timed


def why_not(machine: Machine) -> str | None:
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return None if machine.is_gpu else "a rival is worth timing on a GPU only"


def config_for(c: ModelConfig) -> Any:
    """transformers' configuration of a catalogue shape."""
    import transformers

    if c.family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=c.vocab_size, n_embd=c.hidden_size, n_layer=c.num_layers, n_head=c.num_heads, n_positions=c.max_context,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    return transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, intermediate_size=c.ffn_size,
        max_position_embeddings=c.max_context, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


class Generator:
    def __init__(self, loaded: Loaded, prompt: int, new: int, seed: int) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        device = loaded.model.device
        torch.manual_seed(seed)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config_for(loaded.config), dtype=loaded.model.dtype)
        self.model = model.eval()
        self.on_gpu = device.type == "cuda"
        middle = prompt + (new - NEW) // 2
        self.ids = torch.randint(0, loaded.config.vocab_size, (1, middle), device=device)
        versions = {"transformers": transformers.__version__, "attention": model.config._attn_implementation}
        self.settings = versions | {"timed_prompt": middle, "timed_new_tokens": NEW}
        self._once(4)

    def _once(self, new: int) -> float:
        start = time.perf_counter()
        mask = torch.ones_like(self.ids)
        out = self.model.generate(self.ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        if self.on_gpu:
            torch.cuda.synchronize()
        if out.shape[1] != self.ids.shape[1] + new:
            raise RuntimeError(f"{out.shape[1] - self.ids.shape[1]} tokens instead of {new}")
        return time.perf_counter() - start

    def seconds(self) -> float:
        """Seconds a token of NEW tokens, the prompt's time taken off."""
        with torch.no_grad():
            prompt = self._once(1)
            return (self._once(NEW + 1) - prompt) / NEW


def make(loaded: Loaded, prompt: int, new: int, seed: int) -> Generator:
    return Generator(loaded, prompt, new, seed)
