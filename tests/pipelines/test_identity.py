import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pipelines.identify as identify
from pipelines.identify import DigestCache, make_identity, rope_json
from pipelines.models import load_model
from store.errors import ModelLoadError, ModelMismatchError
from store.identity import ModelIdentity
from tests.tiny import TINY_SHAPES, make_tiny, save_tiny

GOLDEN = "87440a6a7f5e0046e53e061eb83b8430"


def load(folder: Path, cache: Path, dtype: str = "float32") -> ModelIdentity:
    return load_model(str(folder), dtype=dtype, device="cpu", cache_dir=cache).identity


def edit_json(path: Path, **values: object) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **values}))


def other_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    times = path.stat()
    state = load_file(path)
    state["model.norm.weight"] = state["model.norm.weight"] * 1.01
    save_file(state, path, metadata={"format": "pt"})
    assert path.stat().st_size == times.st_size
    # A copying tool that keeps the times must not hide the change.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def other_theta(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    edit_json(folder / "config.json", rope_parameters=rope)


def scaled_rope(folder: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    edit_json(folder / "config.json", rope_parameters=rope)


def other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(data))


def other_norm(folder: Path) -> None:
    edit_json(folder / "config.json", rms_norm_eps=0.5)


def more_positions(folder: Path) -> None:
    edit_json(folder / "config.json", max_position_embeddings=2048)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (other_weights, "weights"),
        (other_theta, "rope"),
        (scaled_rope, "rope"),
        (other_tokenizer, "tokenizer"),
        (other_norm, "config"),
        (more_positions, "max_positions"),
    ],
)
def test_a_change_in_the_same_folder_is_refused_with_its_field(
    tiny_folder, tmp_path, change, field
):
    cache = tmp_path / "cache"
    stored = load(tiny_folder, cache)
    change(tiny_folder)
    given = load(tiny_folder, cache)
    assert [difference.field for difference in stored.differences(given)] == [field]
    assert stored.digest() != given.digest()
    with pytest.raises(ModelMismatchError, match=f"built with {field} "):
        stored.require(given, "kv")


def test_another_dtype_is_refused_with_its_field(tiny_folder, tmp_path):
    stored = load(tiny_folder, tmp_path)
    given = load(tiny_folder, tmp_path, dtype="bfloat16")
    assert [d.field for d in stored.differences(given)] == ["dtype"]


def test_another_layer_count_in_the_same_folder_is_refused_with_its_field(tiny_folder, tmp_path):
    stored = load(tiny_folder, tmp_path / "cache")
    save_tiny(tiny_folder, layers=2)
    differences = stored.differences(load(tiny_folder, tmp_path / "cache"))
    assert differences[0].field == "num_layers"
    assert differences[0].stored == "3"
    assert differences[0].given == "2"


def test_only_the_chat_template_or_a_setting_without_effect_changes_nothing(tiny_folder, tmp_path):
    stored = load(tiny_folder, tmp_path / "cache")
    (tiny_folder / "chat_template.jinja").write_text("{{ messages }}")
    edit_json(tiny_folder / "config.json", use_cache=False, transformers_version="5.25.0")
    assert load(tiny_folder, tmp_path / "cache") == stored


def test_a_copy_of_a_folder_has_the_same_identity(tmp_path):
    first = save_tiny(tmp_path / "a")
    second = save_tiny(tmp_path / "b")
    assert load(first, tmp_path / "cache") == load(second, tmp_path / "cache")


def test_every_random_shape_and_seed_has_its_own_identity():
    identities = [make_tiny(family).identity for family in TINY_SHAPES]
    identities.append(make_tiny("gqa", seed=1).identity)
    assert len({identity.digest() for identity in identities}) == len(identities)


def test_the_identity_digest_is_golden_and_equal_in_processes_with_other_hash_seeds():
    assert make_tiny("gqa").identity.digest() == GOLDEN
    code = "from tests.tiny import make_tiny; print(make_tiny('gqa').identity.digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == GOLDEN


def test_a_whole_number_theta_is_the_same_as_the_float():
    whole = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500}}
    old = {"model_type": "llama", "rope_theta": 500.0}
    assert rope_json(whole) == rope_json(old) == '{"rope_theta":500.0,"rope_type":"default"}'


def test_opt_positions_are_learned():
    assert make_tiny("opt").identity.rope == '{"type":"learned"}'


@pytest.mark.parametrize(
    ("family", "kv_heads"), [("mha", 4), ("gqa", 2), ("mqa", 1), ("opt", 4), ("qwen2", 2)]
)
def test_the_identity_has_the_shape_of_the_model(family, kv_heads):
    shape = make_tiny(family).shape
    assert (shape.num_layers, shape.num_heads, shape.head_dim) == (3, 4, 16)
    assert shape.num_kv_heads == kv_heads


def test_a_missing_head_count_for_keys_means_one_per_query_head():
    config = make_tiny("mha").model.config.to_dict()
    config["num_key_value_heads"] = config["head_dim"] = None
    identity = make_identity(config, dtype="float32", weights="w", tokenizer="t")
    assert (identity.num_kv_heads, identity.head_dim) == (4, 16)


class CountedHash:
    """Counts the files really read."""

    def __init__(self, monkeypatch):
        self.names: list[str] = []
        self.original = identify.hash_file
        monkeypatch.setattr(identify, "hash_file", self)

    def __call__(self, path, on_bytes):
        self.names.append(path.name)
        return self.original(path, on_bytes)


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    cache = tmp_path / "cache" / "digests.json"
    counted = CountedHash(monkeypatch)
    first = DigestCache(cache, racy_s=-1).digest(file)
    assert DigestCache(cache, racy_s=-1).digest(file) == first
    assert len(counted.names) == 1
    file.write_bytes(b"two")
    assert DigestCache(cache, racy_s=-1).digest(file) != first
    assert len(counted.names) == 2


def test_a_file_changed_just_now_is_not_remembered(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    counted = CountedHash(monkeypatch)
    now = file.stat().st_mtime
    for age_s, reads in [(0.5, 1), (0.5, 2), (3.0, 3), (3.0, 3)]:
        DigestCache(tmp_path / "d.json", clock=lambda age_s=age_s: now + age_s).digest(file)
        assert len(counted.names) == reads


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"x": 3}', "\x00\x01"])
def test_a_damaged_digest_cache_is_ignored_and_replaced(tmp_path, damage, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    path = tmp_path / "digests.json"
    expected = DigestCache(path, racy_s=-1).digest(file)
    path.write_text(damage.replace("x", str(file)))
    counted = CountedHash(monkeypatch)
    assert DigestCache(path, racy_s=-1).digest(file) == expected
    assert DigestCache(path, racy_s=-1).digest(file) == expected
    assert len(counted.names) == 1


def test_a_digest_cache_that_cannot_be_written_is_no_error(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    (tmp_path / "in-the-way").write_text("")
    cache = DigestCache(tmp_path / "in-the-way" / "digests.json", racy_s=-1)
    assert cache.digest(file) == identify.hash_file(file)


def test_opening_a_model_again_reads_no_weights_for_its_identity(
    tiny_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("pipelines.model_files.DigestCache", lambda p: DigestCache(p, racy_s=-1))
    first = load(tiny_folder, tmp_path / "cache")
    counted = CountedHash(monkeypatch)
    assert load(tiny_folder, tmp_path / "cache") == first
    assert counted.names == []


def test_sharded_weights_count_with_every_shard(tiny_folder, tmp_path):
    make_tiny("gqa").model.save_pretrained(tiny_folder, max_shard_size="100KB")
    (tiny_folder / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(tiny_folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert identify.weight_files(tiny_folder) == shards
    stored = load(tiny_folder, tmp_path / "cache")
    state = load_file(shards[-1])
    name = next(iter(state))
    save_file({**state, name: state[name] + 1}, shards[-1], metadata={"format": "pt"})
    given = load(tiny_folder, tmp_path / "cache")
    assert [d.field for d in stored.differences(given)] == ["weights"]
    shards[0].unlink()
    with pytest.raises(ModelLoadError, match=shards[0].name):
        load(tiny_folder, tmp_path / "cache")


def test_weights_loaded_from_a_folder_do_not_change_with_the_file(tiny_folder, tmp_path):
    loaded = load_model(str(tiny_folder), dtype="float32", device="cpu", cache_dir=tmp_path)
    before = loaded.model.model.norm.weight.clone()
    path = tiny_folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-path.stat().st_size // 2, os.SEEK_END)
        file.write(b"\xff" * (path.stat().st_size // 2))
    assert torch.equal(loaded.model.model.norm.weight, before)
    assert all(torch.isfinite(p).all() for p in loaded.model.parameters())
