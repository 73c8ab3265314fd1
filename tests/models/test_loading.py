"""Weights from real files on disk: shards, damage of every kind, GGUF, random shapes, and names that lead nowhere."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding import cut, whole_logits
from safetensors.torch import load_file, save_file

from pdlab.core.errors import CapacityError, DeviceUnavailable, FetchError, UnknownModel, WeightsError
from pdlab.models.catalogue import CATALOGUE, config_of, list_entries, parameter_count
from pdlab.models.loading import load

Folder = Callable[..., tuple[Path, Any]]
TOKENS = list(range(3, 50))
LLAMA = "llama-gqa9to3-head24-untied-biases-llama3"


@pytest.fixture
def copy(folder: Folder, tmp_path: Path) -> Callable[[str], Path]:
    """A folder of one's own to damage."""
    return lambda shape: Path(shutil.copytree(folder(shape)[0], tmp_path / "copy"))


def shard(path: Path) -> list[Path]:
    """Splits model.safetensors in three, with an index, as large models come."""
    tensors = load_file(path / "model.safetensors")
    names, files, where = sorted(tensors), [], {}
    for i in range(3):
        files.append(path / f"model-0000{i + 1}-of-00003.safetensors")
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, files[-1])
        where.update(dict.fromkeys(part, files[-1].name))
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_shards_give_the_same_model_as_one_file(folder: Folder, copy: Callable[[str], Path]) -> None:
    path = copy(LLAMA)
    shard(path)
    assert torch.equal(whole_logits(load(path).model, TOKENS), whole_logits(load(folder(LLAMA)[0]).model, TOKENS))


def test_old_exports_load_too(folder: Folder, copy: Callable[[str], Path]) -> None:
    """pytorch_model.bin, names without `transformer.`, masks saved as tensors, rope_theta at the top of config.json."""
    path = copy("gpt2-tied")
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(path / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 150, 150, dtype=torch.bool)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert torch.equal(whole_logits(load(path).model, TOKENS), whole_logits(load(folder("gpt2-tied")[0]).model, TOKENS))
    shutil.rmtree(path)
    path = copy(LLAMA)
    old = json.loads((path / "config.json").read_text())
    rope = old.pop("rope_parameters")
    (path / "config.json").write_text(json.dumps({**old, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}))
    assert config_of(path) == config_of(folder(LLAMA)[0]).__class__(**{**vars(config_of(folder(LLAMA)[0])), "name": "copy"})


def damage_missing_shard(path: Path) -> None:
    shard(path)[1].unlink()


def damage_half_a_shard(path: Path) -> None:
    cut(shard(path)[2], 0.5)


def damage_header_cut(path: Path) -> None:
    cut(path / "model.safetensors", 0.001)


def damage_empty_file(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def damage_no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def damage_bad_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def damage_nan(path: Path) -> None:
    rewrite(path, lambda t: t["model.layers.1.self_attn.k_proj.weight"].view(-1)[77].fill_(torch.nan))


def damage_infinity(path: Path) -> None:
    rewrite(path, lambda t: t["model.norm.weight"][3].fill_(-torch.inf))


def damage_wrong_shape(path: Path) -> None:
    rewrite(path, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(131, 72)}))


def damage_missing_tensor(path: Path) -> None:
    rewrite(path, lambda t: t.pop("model.layers.1.mlp.down_proj.bias"))


def damage_quantized(path: Path) -> None:
    rewrite(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))


def damage_config_without_biases(path: Path) -> None:
    edit_config(path, attention_bias=False)


def damage_config_of_fewer_layers(path: Path) -> None:
    edit_config(path, num_hidden_layers=1)


def damage_config_without_size(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    del config["intermediate_size"]
    (path / "config.json").write_text(json.dumps(config))


def damage_config_cut(path: Path) -> None:
    cut(path / "config.json", 0.5)


def damage_yarn(path: Path) -> None:
    edit_config(path, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})


def damage_activation(path: Path) -> None:
    edit_config(path, hidden_act="relu2")


def damage_index_without_files(path: Path) -> None:
    shard(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 5}}')


def rewrite_header(path: Path, **changes: Any) -> None:
    data = (path / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["model.norm.weight"] |= changes
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def damage_header_offsets(path: Path) -> None:
    rewrite_header(path, data_offsets=[0])


def damage_header_dtype(path: Path) -> None:
    rewrite_header(path, dtype="F99")


def damage_tokenizer_cut(path: Path) -> None:
    (path / "tokenizer.json").write_text('{"version": "1.0", "model": {')


DAMAGES: dict[Callable[[Path], None], tuple[str, ...]] = {
    damage_missing_shard: ("model-00002-of-00003.safetensors is missing", "index.json"),
    damage_half_a_shard: ("model-00003-of-00003.safetensors has", "half-written"),
    damage_header_cut: ("model.safetensors", "header is cut off"),
    damage_empty_file: ("model.safetensors (0 bytes)",),
    damage_no_weights: ("has no weights", "model.safetensors.index.json"),
    damage_bad_pickle: ("pytorch_model.bin", "cannot be read as torch weights"),
    damage_nan: ("'model.layers.1.self_attn.k_proj.weight'", "model.safetensors", "1 of 5,184 elements"),
    damage_infinity: ("'model.norm.weight'", "infinity"),
    damage_wrong_shape: ("'model.layers.0.mlp.up_proj.weight'", "[131, 72]", "[130, 72]"),
    damage_missing_tensor: ("no tensor 'model.layers.1.mlp.down_proj.bias'", "model.safetensors"),
    damage_quantized: ("'lm_head.weight'", "torch.int8", "bfloat16"),
    damage_config_without_biases: ("'model.layers.0.self_attn.k_proj.bias'", "no place for"),
    damage_config_of_fewer_layers: ("'model.layers.1.", "no place for"),
    damage_config_without_size: ("config.json lacks 'intermediate_size'",),
    damage_config_cut: ("config.json cannot be read as JSON",),
    damage_yarn: ("'yarn'", "llama3"),
    damage_activation: ("hidden_act='relu2'", "silu"),
    damage_index_without_files: ("index.json has no 'weight_map'",),
    damage_header_offsets: ("model.safetensors has a header",),
    damage_header_dtype: ("model.safetensors is no whole safetensors file", "F99"),
    damage_tokenizer_cut: ("tokenizer.json cannot be read",),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__.removeprefix("damage_"))
def test_damaged_weights_are_named_with_what_would_be_right(
    damage: Callable[[Path], None], copy: Callable[[str], Path]
) -> None:
    path = copy(LLAMA)
    damage(path)
    with pytest.raises(WeightsError) as caught:
        load(path)
    for words in DAMAGES[damage]:
        assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("shape", [LLAMA, "gpt2-tied"])
def test_a_config_of_wrong_types_or_sizes_is_named_whatever_the_key(shape: str, copy: Callable[[str], Path]) -> None:
    path = copy(shape)
    good = json.loads((path / "config.json").read_text())
    unused = {k for k in good if k.endswith("dropout") or k.startswith(("summary", "_")) or k in ("architectures", "use_cache")}
    refused: list[str] = []
    for key in sorted(set(good) - unused):
        for junk in (None, "5", "x", -1, 0, 1.5, float("nan"), [], {}, [1], 10**12, 10**30):
            edit_config(path, **{**good, key: junk})
            try:
                load(path)
            except (WeightsError, UnknownModel) as error:
                refused.append(str(error))
            except CapacityError:
                assert junk == 10**12 or key == "max_position_embeddings", (key, junk)
    assert len(refused) > 60
    assert all(str(path) in message for message in refused)


def test_weights_too_large_for_float16_are_refused_with_a_dtype_that_holds_them(copy: Callable[[str], Path]) -> None:
    path = copy("llama-mha-tied")
    rewrite(path, lambda t: t["model.layers.0.mlp.gate_proj.weight"][0, 0].fill_(70_000.0))
    load(path, dtype="bfloat16")
    with pytest.raises(WeightsError, match=r"gate_proj\.weight.*reaches 70000.*bfloat16"):
        load(path, dtype="float16")


def test_names_that_lead_nowhere_list_what_would_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import of it fails
    (tmp_path / "weights.txt").write_text("no model")
    names = (
        "no-such-model",
        "random:no-such",
        "llama-1b",
        str(tmp_path),
        str(tmp_path / "weights.txt"),
        "someone/some-model",
        "",
    )
    for name in names:
        with pytest.raises(UnknownModel) as caught:
            load(name)
        assert name in str(caught.value)
        if name != str(tmp_path):
            assert "qwen3-0.6b" in caught.value.hint
    with pytest.raises(UnknownModel, match="for random weights use random:llama-1b"):
        load("llama-1b")
    with pytest.raises(UnknownModel, match=r"pdlab\[hub\]"):
        load("someone/some-model")
    for name in ("random:no-such", "no-such"):
        with pytest.raises(UnknownModel, match="gpt2-xl"):
            config_of(name)


def test_a_hub_id_is_fetched_where_the_hub_package_is(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "someone/gone":
            raise OSError("404")
        return str(folder("gpt2-tied")[0])

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    loaded = load("someone/gpt2-ish")
    assert loaded.config.family == "gpt2"
    assert loaded.source == str(folder("gpt2-tied")[0])
    assert asked[0][0] == "someone/gpt2-ish"
    assert "*.safetensors" in asked[0][1]
    with pytest.raises(FetchError, match="someone/gone could not be fetched"):
        load("someone/gone")


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"device": "cuda:99"}])
def test_a_dtype_or_device_that_is_not_there_is_refused(options: dict[str, Any]) -> None:
    if "device" in options and torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    with pytest.raises(DeviceUnavailable):
        load("random:llama-tiny", **options)


@pytest.mark.parametrize("name", ["random:llama-tiny", "random:gpt2-tiny"])
def test_random_models_are_seeded_sane_and_read_text(name: str) -> None:
    a, b, other = load(name, seed=4), load(name, seed=4), load(name, seed=5)
    logits = whole_logits(a.model, TOKENS)
    assert torch.equal(logits, whole_logits(b.model, TOKENS))
    assert not torch.equal(logits, whole_logits(other.model, TOKENS))
    assert 0.3 < logits.std() < 3
    assert len(set(logits.argmax(-1).tolist())) > len(TOKENS) // 4, "the argmax should depend on the prompt"
    assert a.tokenizer is not None
    assert a.tokenizer.decode(a.tokenizer.encode("grüß 🙂")) == "grüß 🙂"
    assert a.source == "random"
    for dtype in ("bfloat16", "float16"):
        rough = load(name, dtype=dtype, seed=4).model
        assert whole_logits(rough, TOKENS).isfinite().all()


def test_catalogue_shapes_have_their_published_sizes() -> None:
    published = {  # parameters, from each model's card or paper
        "smollm2-135m": 134_515_008,
        "llama-1b": 1_235_814_400,
        "llama-2-7b": 6_738_415_616,
        "llama-3-8b": 8_030_261_248,
        "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360,
        "gpt2": 124_439_808,
        "gpt2-xl": 1_557_611_200,
    }
    counted = {e.name: e.parameters for e in list_entries()}
    assert counted == {**published, "llama-tiny": counted["llama-tiny"], "gpt2-tiny": counted["gpt2-tiny"]}
    for name in ("llama-tiny", "gpt2-tiny"):
        model = load(f"random:{name}").model
        assert counted[name] == sum(t.numel() for t in model.tensors()) == parameter_count(CATALOGUE[name])
    assert config_of("random:llama-1b") == config_of("llama-1b")
    assert config_of("llama-1b").kv_bytes_per_token(2) == 32_768


@pytest.mark.slow
def test_trained_gpt2_style_weights_give_transformers_logits(tmp_path: Path) -> None:
    """A published GPT-2-style model (not of language: a vocabulary of microbe genera), from a package of 33 MB."""
    import subprocess
    import zipfile

    transformers = pytest.importorskip("transformers")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "microformer-mgm==0.5.8"]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"microformer-mgm 0.5.8 cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        for file in ("config.json", "pytorch_model.bin"):
            (tmp_path / file).write_bytes(wheel.read(f"mgm/resources/general_model/{file}"))
    tokens = torch.randint(4, 9669, (1, 301), generator=torch.Generator().manual_seed(0))
    tokens[0, 0] = 2  # its begin token
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_json_file(tmp_path / "config.json")).eval()
    theirs.load_state_dict(torch.load(tmp_path / "pytorch_model.bin", map_location="cpu", weights_only=True))
    with torch.no_grad():
        want = theirs(tokens).logits[0]
    got = whole_logits(load(tmp_path).model, tokens[0].tolist())
    assert (got - want).abs().max() < 1e-4  # logits up to 16 after eight layers of float32: measured 7e-6
    assert torch.equal(got.argmax(-1), want.argmax(-1))
