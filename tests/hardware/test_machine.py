"""Data sheets, the probe and the driver's state: right where they can be checked, and never in the way."""

from __future__ import annotations

import sys
import types

import pytest

from pdlab.core.errors import DeviceUnavailable
from pdlab.hardware import nvml, probe, specs


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("  Tesla  T4 ", "tesla-t4"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
    ],
)
def test_a_slug_is_the_devices_name_in_lower_case_with_hyphens(name: str, slug: str) -> None:
    assert specs.device_slug(name) == slug
    assert specs.spec(name).slug == slug


@pytest.mark.parametrize("sheet", specs.SPECS.values(), ids=list(specs.SPECS))
def test_data_sheets_are_plausible_dense_rates(sheet: specs.DeviceSpec) -> None:
    # a sparse rate taken for a dense one would put the ridge of a data-centre part far above 330 FLOPs a byte
    assert 50 < sheet.fp16_flops / sheet.bandwidth < 420
    assert sheet.fp32_flops < sheet.fp16_flops
    assert sheet.bf16_flops in (0, sheet.fp16_flops)
    assert (sheet.bf16_flops == 0) == (sheet.capability < (8, 0))
    assert 15e9 < sheet.memory_bytes < 200e9
    assert 1 << 20 < sheet.l2_bytes < 1 << 28
    assert 30 < sheet.multiprocessors < 200
    assert sheet.source.startswith("https://")


def test_short_names_find_the_same_sheet_and_unknown_ones_list_the_known() -> None:
    assert specs.spec("A100-40") is specs.spec("nvidia-a100-sxm4-40gb")
    assert specs.find_spec("abacus") is None
    with pytest.raises(DeviceUnavailable, match="nvidia-h200"):
        specs.spec("abacus")
    with pytest.raises(DeviceUnavailable, match="float16"):
        specs.spec("h200").flops("int4")


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (None, "float32"),
        ((7, 5), "float16"),
        ((7, 0), "float16"),
        ((8, 0), "bfloat16"),
        ((8, 9), "bfloat16"),
        ((10, 0), "bfloat16"),
    ],
)
def test_the_dtype_follows_the_capability(capability: tuple[int, int] | None, dtype: str) -> None:
    assert probe.default_dtype(capability) == dtype
    assert probe.triton_dot_allowed(capability) == (dtype == "bfloat16")


def test_the_probe_describes_a_cpu() -> None:
    machine = probe.probe("cpu")
    assert machine.device == "cpu"
    assert machine.dtype == "float32"
    assert machine.profile == "smoke"
    assert machine.slug.startswith("cpu-")
    assert machine.memory_bytes > 2**28
    assert not machine.is_gpu


class _Cuda(types.ModuleType):
    """As much of torch.cuda as the probe asks for."""

    def __init__(self, major: int, minor: int, fails: bool = False) -> None:
        super().__init__("torch.cuda")
        self._props = types.SimpleNamespace(
            name="NVIDIA H200",
            major=major,
            minor=minor,
            total_memory=150 * 10**9,
            multi_processor_count=132,
            L2_cache_size=60 << 20,
        )
        self._fails = fails

    def is_available(self) -> bool:
        return True

    def get_device_properties(self, index: int) -> types.SimpleNamespace:
        if self._fails or index > 0:
            raise RuntimeError("the driver is too old for this runtime")
        return self._props


def _fake_torch(monkeypatch: pytest.MonkeyPatch, cuda: _Cuda) -> None:
    fake = types.ModuleType("torch")
    fake.cuda, fake.zeros, fake.__version__ = cuda, lambda n: [0] * n, "2.11.0+cu130"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)


def test_the_probe_describes_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(monkeypatch, _Cuda(9, 0))
    machine = probe.probe()
    assert (machine.slug, machine.dtype, machine.profile, machine.capability) == ("nvidia-h200", "bfloat16", "full", (9, 0))
    assert machine.multiprocessors == 132
    assert probe.resolve_device("cuda:0").device == "cuda"


def test_an_unusable_driver_leaves_the_cpu_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(monkeypatch, _Cuda(9, 0, fails=True))
    machine = probe.probe()
    assert machine.device == "cpu"
    assert "too old" in (machine.problem or "")
    with pytest.raises(DeviceUnavailable, match="too old"):
        probe.resolve_device("cuda")


def test_a_gpu_number_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(monkeypatch, _Cuda(9, 0))
    with pytest.raises(DeviceUnavailable, match="cuda:3"):
        probe.resolve_device("cuda:3")


@pytest.mark.parametrize("error", [ImportError("no torch"), OSError("libcudart.so.13: cannot open"), AttributeError("half")])
def test_the_probe_survives_any_state_of_torch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "torch":
                raise error

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    machine = probe.probe()
    assert machine.torch_version is None
    assert str(error) in (machine.problem or "")
    with pytest.raises(DeviceUnavailable):
        probe.resolve_device()


LINE = "NVIDIA H200, 580.159.04, 1980, 3201, 1980, 41, 231.5, 700.00, {}"


@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [("0x0000000000000000", False), ("0x0000000000000004", False), ("0x0000000000000020", True), ("0x0000000000000048", True)],
)
def test_heat_throttles_and_the_power_cap_does_not(reasons: str, throttled: bool) -> None:
    state = nvml._parse_smi(LINE.format(reasons))
    assert state is not None
    assert state.throttled is throttled
    assert state.sm_mhz == 1980
    assert state.power_w == 231.5


def test_fields_that_a_driver_does_not_report_are_none() -> None:
    state = nvml._parse_smi("Tesla T4, 535.1, [N/A], 5001, 1590, 40, [Not Supported], 70.00, [N/A]")
    assert state is not None
    assert (state.sm_mhz, state.power_w, state.reasons) == (None, None, 0)
    assert nvml._parse_smi("too, few") is None


def test_without_a_driver_provenance_has_its_keys_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "state", lambda index=0: None)
    assert nvml.clocks() == nvml.UNKNOWN
    assert set(nvml.UNKNOWN) == {"gpu", "driver", "clocks", "temperature", "power", "throttle"}


def test_nvidia_smi_is_asked_with_the_older_names_when_it_knows_no_newer(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "nvidia-smi"
    script.write_text(f'#!/bin/sh\ncase "$1" in *event*) exit 2;; esac\necho "{LINE.format("0x0000000000000001")}"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ImportError
    state = nvml.state()
    assert state is not None
    assert state.reason_names == ["idle"]


def test_the_driver_is_not_asked_after_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(nvml, "_recent", {})
    monkeypatch.setattr(nvml, "state", lambda index=0: asked.append(index))
    for _ in range(5):
        assert nvml.recent_state() is None
    nvml.recent_state(1)
    assert asked == [0, 1]
