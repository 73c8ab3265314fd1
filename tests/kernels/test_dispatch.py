"""The attention that a step gets: by device, by force, by a measured table; and the library backends against float64."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from attention_cases import make_case, oracle, relative

from pdlab.core.config import EngineConfig
from pdlab.core.errors import DeviceUnavailable, MeasurementError
from pdlab.kernels import dispatch, tuning
from pdlab.kernels.dispatch import choose, default_backend, make_ops, why_not


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


MIXED: list[dict[str, Any]] = [
    {"lens": [5, 133, 64, 1], "queries": [1, 1, 1, 1], "heads": 6, "kv_heads": 2, "dim": 24, "page": 7},
    {"lens": [90, 13, 64, 30, 77], "queries": [50, 13, 1, 1, 77], "heads": 4, "kv_heads": 4, "dim": 40, "page": 16},
    {"lens": [90, 13, 64, 30], "queries": [50, 13, 1, 3], "heads": 6, "kv_heads": 2, "dim": 16, "page": 1, "paged": False},
]


@pytest.mark.parametrize("name", ["auto", "plain", "sdpa"])
@pytest.mark.parametrize("case", MIXED, ids=["decodes", "mixed", "extents"])
def test_backends_match_float64_on_mixed_steps(name: str, case: dict[str, Any]) -> None:
    q, view = make_case(**case)
    ops = make_ops(EngineConfig(attention=name), Shape(case["heads"], case["kv_heads"], case["dim"]), "cpu", "float32")
    # float32 sums of at most 133 terms in another order
    assert relative(ops.attention(q, view), oracle(q, view)) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "sdpa", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "triton", "auto"])
@pytest.mark.parametrize("case", MIXED, ids=["decodes", "mixed", "extents"])
def test_each_backend_can_be_forced_on_a_gpu(name: str, case: dict[str, Any]) -> None:
    import torch

    capability = torch.cuda.get_device_capability()
    dtype = "bfloat16" if capability >= (8, 0) else "float16"
    if reason := why_not(name, capability) if name != "auto" else None:
        pytest.skip(reason)
    q, view = make_case(**(case | {"dim": 64}), dtype=dtype, device="cuda")
    ops = make_ops(EngineConfig(attention=name), Shape(case["heads"], case["kv_heads"], 64), "cuda", dtype)
    # p and the output are rounded to bfloat16: a relative 2^-9 each on average
    assert relative(ops.attention(q, view).cpu(), oracle(q, view).cpu()) < 8e-3


def test_sdpa_decodes_without_host_lengths_as_in_a_captured_graph() -> None:
    from dataclasses import replace

    q, view = make_case(**MIXED[0])
    ops = make_ops(EngineConfig(attention="sdpa"), Shape(6, 2, 24), "cpu", "float32")
    assert relative(ops.attention(q, replace(view, host_lens=())), oracle(q, view)) < 2e-6


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_forced_backend_that_cannot_run_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(DeviceUnavailable, match=f"attention='{name}' is not possible here: .*(CUDA device|not installed)"):
        make_ops(EngineConfig(attention=name), Shape(2, 2, 16), "cpu", "float32")


def test_kernels_built_on_products_are_never_chosen_below_8_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "_missing", lambda module: None)
    assert default_backend((7, 5), "float16") == "sdpa"
    assert "7.5" in (why_not("triton", (7, 5)) or "")
    assert default_backend(None, "float32") == "plain"
    assert default_backend((8, 0), "bfloat16") == "triton"
    assert default_backend((9, 0), "float32") == "sdpa"


def test_flash_attn_needs_pages_of_a_multiple_of_256() -> None:
    unfit = dispatch._unfit("flash_attn", EngineConfig(page_size=16), Shape(8, 8, 64))
    assert unfit is not None
    assert "256" in unfit
    assert dispatch._unfit("flash_attn", EngineConfig(page_size=256), Shape(8, 8, 64)) is None


def test_head_sizes_above_256_are_not_the_kernels() -> None:
    assert dispatch._unfit("triton", EngineConfig(), Shape(8, 8, 320)) is not None


def test_the_first_rule_that_fits_decides_and_none_leaves_the_default() -> None:
    rules = [
        {"phase": "prefill", "max_q": 512, "dtype": "bfloat16", "backend": "sdpa:cudnn"},
        {"phase": "prefill", "backend": "triton"},
        {"phase": "decode", "max_batch": 2, "max_kv": 4096, "backend": "plain"},
    ]
    facts = {"dtype": "bfloat16", "head_dim": 128}
    assert choose(rules, "default", q=512, kv=9999, batch=64, **facts) == "sdpa:cudnn"
    assert choose(rules, "default", q=513, kv=9999, batch=64, **facts) == "triton"
    assert choose(rules, "default", q=1, kv=4096, batch=2, **facts) == "plain"
    assert choose(rules, "default", q=1, kv=4097, batch=2, **facts) == "default"


def test_the_users_table_overrides_the_rule_and_a_broken_one_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    (tmp_path / "tuning").mkdir()
    tile = {"block_n": 32, "warps": 2, "stages": 5, "blocks_per_sm": 3, "note": "ignored"}
    entries = {"attention_tiles": [{"kind": "decode", "head_dim": 128, "max_rows": 16, **tile}]}
    (tmp_path / "tuning" / "some-gpu.json").write_text(json.dumps(entries))
    (tmp_path / "tuning" / "other-gpu.json").write_text("{")
    tuning.table.cache_clear()
    try:
        device = tuning.Tuning("some-gpu", (9, 0), 132, 50 << 20)
        assert device.decode(128, 4) == tuning.DecodeTile(32, 2, 5, 3)
        assert device.decode(128, 32) == tuning.decode_rule(device.shared_bytes, 128, 32)
        assert device.decode(128, 4, kv=99, batch=1, page=16) == tuning.DecodeTile(32, 2, 5, 3)
        assert device.most_decode_programs(128) == 3 * 132
        with pytest.raises(MeasurementError, match="other-gpu"):
            tuning.Tuning("other-gpu", (9, 0), 132, 50 << 20).decode(128, 4)
    finally:
        tuning.table.cache_clear()


def test_hoppers_prefill_kernel_is_taken_by_rule_unless_a_table_says_that_there_is_a_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    (tmp_path / "tuning").mkdir()
    none = {"consumers": 0, "block_n": 0, "stages": 0}
    entry = {"kind": "prefill_hopper", "head_dim": 128, "max_queries": 256, "group": 4}
    (tmp_path / "tuning" / "some-gpu.json").write_text(json.dumps({"attention_tiles": [entry | none]}))
    tuning.table.cache_clear()
    try:
        device = tuning.Tuning("some-gpu", (9, 0), 132, 50 << 20)
        assert device.hopper(128, 256, group=4) is None
        assert device.hopper(128, 257, group=4) == tuning.hopper_rule(128, 257)
        assert device.hopper(128, 256, group=1) == tuning.hopper_rule(128, 256)
        assert device.hopper(80, 256, group=4) is None
        assert device.hopper(64, 4096, group=4) == tuning.hopper_rule(64, 4096)
        for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
            assert tuning.Tuning("some-gpu", capability, 132, 50 << 20).hopper(128, 4096) is None
    finally:
        tuning.table.cache_clear()


def test_the_users_entries_come_before_the_shipped_ones_and_hide_none_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {
        "shipped": {
            "attention_dispatch": [{"phase": "decode", "backend": "sdpa"}, {"phase": "prefill", "backend": "sdpa"}],
            "attention_tiles": [{"kind": "decode", "block_n": 64, "warps": 4, "stages": 3, "blocks_per_sm": 2}],
            "measured": {"attention_tiles": {"run_id": "r"}},
        },
        "home": {"attention_dispatch": [{"phase": "decode", "backend": "plain"}]},
    }
    for name, content in tables.items():
        (tmp_path / name / "tuning").mkdir(parents=True)
        (tmp_path / name / "tuning" / "some-gpu.json").write_text(json.dumps(content))
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tuning, "data_dir", lambda: tmp_path / "shipped")
    tuning.table.cache_clear()
    try:
        merged = tuning.table("some-gpu")
        facts = {"dtype": "bfloat16", "head_dim": 128, "kv": 64, "batch": 1}
        assert choose(merged["attention_dispatch"], "triton", q=1, **facts) == "plain"
        assert choose(merged["attention_dispatch"], "triton", q=9, **facts) == "sdpa"
        assert tuning.Tuning("some-gpu", (9, 0), 132, 50 << 20).decode(128, 4) == tuning.DecodeTile(64, 4, 3, 2)
        assert "measured" not in merged
    finally:
        tuning.table.cache_clear()


def test_a_step_follows_the_table_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.hardware.probe import cpu_slug
    from pdlab.kernels import library_attention

    rules = [
        {"phase": "prefill", "max_q": 64, "max_kv": 64, "backend": "sdpa"},
        {"phase": "decode", "min_page": 256, "backend": "flash_attn"},  # not installed here: the rule is passed over
        {"phase": "decode", "max_page": 255, "max_batch": 3, "backend": "sdpa"},
    ]
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / f"{cpu_slug()}.json").write_text(json.dumps({"attention_dispatch": rules}))
    monkeypatch.setenv("PDLAB_HOME", str(tmp_path))
    asked: list[str] = []
    real = library_attention.sdpa

    def noted(q: Any, view: Any, **kernel: Any) -> Any:
        asked.append("sdpa")
        return real(q, view, **kernel)

    monkeypatch.setattr(library_attention, "sdpa", noted)
    tuning.table.cache_clear()
    try:
        ops = make_ops(EngineConfig(), Shape(6, 2, 24), "cpu", "float32")
        for lens, queries, expected in (
            ([40], [40], ["sdpa"]),
            ([70], [70], []),
            ([40, 9, 3], [1, 1, 1], ["sdpa"]),
            ([40, 9, 3, 5], [1, 1, 1, 1], []),
        ):
            q, view = make_case(lens, queries, heads=6, kv_heads=2, dim=24, page=7)
            assert relative(ops.attention(q, view), oracle(q, view)) < 2e-6
            assert asked == expected, (lens, queries)
            asked.clear()
    finally:
        tuning.table.cache_clear()


def test_flash_attn_is_asked_for_the_same_attention_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signature of the package's documentation, computed in plain PyTorch."""
    import types

    import torch

    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, *,
               causal: bool, block_table: Any) -> Any:  # fmt: skip
        assert causal
        assert k.shape[1] % 256 == 0
        out = []
        for b in range(len(cu_seqlens_q) - 1):
            rows = q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]
            m = int(cu_seqlens_k[b + 1] - cu_seqlens_k[b])
            keys, values = (c[block_table[b].long()].flatten(0, 1)[:m].repeat_interleave(q.shape[1] // k.shape[2], 1)
                            for c in (k, v))  # fmt: skip
            late = torch.arange(m) > torch.arange(m - len(rows), m)[:, None]
            scores = torch.einsum("qhd,khd->hqk", rows, keys) * q.shape[2] ** -0.5
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(late, -torch.inf).softmax(-1), values))
        return torch.cat(out)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(dispatch, "why_not", lambda backend, capability: None)
    q, view = make_case([300, 41, 513], [5, 1, 513], heads=6, kv_heads=2, dim=16, page=256, unused=0.0)
    ops = make_ops(EngineConfig(attention="flash_attn", page_size=256), Shape(6, 2, 16), "cpu", "float32")
    assert relative(ops.attention(q, view), oracle(q, view)) < 2e-6


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_a_kernel_of_sdpa_can_be_forced_and_needs_a_gpu(kernel: str) -> None:
    name = f"sdpa:{kernel}"
    assert why_not(name, (8, 0)) is None
    with pytest.raises(DeviceUnavailable, match=f"{name} needs a CUDA device"):
        make_ops(EngineConfig(attention=name), Shape(2, 2, 16), "cpu", "float32")


def test_backends_are_listed_with_reasons_even_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pdlab.kernels.dispatch import backends\n"
        "import json; print(json.dumps(backends()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert set(found) == {"plain", "sdpa", "triton", "flash_attn"}
    assert not any(usable for usable, _ in found.values())
    assert all(reason for _, reason in found.values())
