"""Finding the model and its errors, before any process is started."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from blockyard.services.launcher.models import hub, model_files
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.errors import ConfigError

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 7}


def find(*args: str, weights: bool = True) -> Checkpoint:
    return model_files.find(parsed_flags.Values(parsed_flags.from_command_line(args)[0]), weights)


def folder(path: Path, config: object = LLAMA) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_the_shipped_model_needs_no_folder() -> None:
    demo = find("--model", "demo")
    assert demo.path == demo.tokenizer_path == model_files.demo_folder()
    assert demo.config["architectures"] == ["LlamaForCausalLM"]
    assert demo.generation


def test_the_config_of_another_folder(tmp_path: Path) -> None:
    name, other = folder(tmp_path / "m"), folder(tmp_path / "other", LLAMA | {"vocab_size": 99})
    found = find("--model", name, "--hf-config-path", other)
    assert (found.path, found.config_path, found.config["vocab_size"]) == (tmp_path / "m", tmp_path / "other", 99)
    assert find("--model", name).config_path is None
    (tmp_path / "m" / "config.json").unlink()  # not needed then
    assert find("--model", name, "--hf-config-path", other).config["vocab_size"] == 99
    with pytest.raises(ConfigError, match="model /none: no such folder"):
        find("--model", name, "--hf-config-path", "/none")


def test_a_local_folder_and_another_ones_tokenizer(tmp_path: Path) -> None:
    name = folder(tmp_path / "m")
    found = find("--model", name, "--tokenizer", "demo", "--revision", "r1")
    assert (found.name, found.path, found.tokenizer_path) == (name, tmp_path / "m", model_files.demo_folder())
    assert (found.revision, found.generation, found.config) == ("r1", {}, LLAMA)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 7}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported: its layers keep states",
        ),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ("[" * 100_000, "is not a JSON object"),
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path: Path, config: object, words: str) -> None:
    name = folder(tmp_path / "m", config)
    with pytest.raises(ConfigError) as error:
        find("--model", name)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Qwen3ForCausalLMNext",
            "architecture Qwen3ForCausalLMNext is not supported; the nearest that is: Qwen3ForCausal",
        ),
        ("BloomForCausalLM", "architecture BloomForCausalLM is not supported: its attention adds a bias by distance"),
        ("DeepseekV32ForCausalLM", "an indexer picks the keys"),
        ("Gemma3nForConditionalGeneration", "inputs of its own"),
    ],
)
def test_an_unsupported_architecture_is_refused_with_the_nearest_or_the_reason(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        find("--model", folder(tmp_path / "m", {"architectures": [name]}))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_architecture_may_be_overridden(tmp_path: Path) -> None:
    name = folder(tmp_path / "m", {"architectures": ["MyLlama"]})
    with pytest.raises(ConfigError, match="architecture MyLlama is not supported"):
        find("--model", name)
    found = find("--model", name, "--hf-overrides", '{"architectures": ["LlamaForCausalLM"]}')
    assert (found.path, found.config) == (tmp_path / "m", {"architectures": ["MyLlama"]}), "config.json as it is"
    with pytest.raises(ConfigError, match="architecture Mamba is not supported"):
        find("--model", folder(tmp_path / "n"), "--hf-overrides", '{"architectures": ["Mamba"]}')


FOREIGN = LLAMA | {"quantization_config": {"quant_method": "tpu_int8"}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            FOREIGN,
            "quant_method 'tpu_int8', which is refused: needs hardware .*; supported: .*mxfp4.*; without quantiz",
        ),
        (LLAMA | {"quantization_config": {"quant_method": "no"}}, "quant_method 'no', which is not supported; supp"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "has no quant_method; supported: .*fp8"),
        (LLAMA | {"quantization_config": "fp8"}, "is 'fp8', and no object; supported: .*fp8"),
    ],
)
def test_an_unknown_quantization_is_refused_with_those_that_are_known(
    tmp_path: Path, config: object, words: str
) -> None:
    name = folder(tmp_path, config)
    with pytest.raises(ConfigError, match=words):
        find("--model", name)
    find("--model", name, weights=False)
    find("--model", name, "--worker-cls", "mock")


def test_the_quantization_may_be_overridden(tmp_path: Path) -> None:
    name = folder(tmp_path, FOREIGN)
    find("--model", name, "--hf-overrides", '{"quantization_config": null}')
    find("--model", name, "--hf-overrides", '{"quantization_config": {"quant_method": "mxfp4"}}')
    with pytest.raises(ConfigError, match="quant_method 'tpu_int8'"):
        find("--model", name, "--hf-overrides", '{"quantization_config": {"activation_scheme": "static"}}')


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find("--model", str(tmp_path))
    assert find("--model", str(tmp_path), "--worker-cls", "mock").config == {}
    assert find("--model", str(tmp_path), weights=False).config == {}


def test_a_model_inside_a_folder_of_modules(tmp_path: Path) -> None:
    """Older releases of sentence-transformers write the Transformer to a folder of its own."""
    entries = [{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=r"0_Transformer has no config\.json"):
        find("--model", str(tmp_path))
    folder(tmp_path / "0_Transformer")
    found = find("--model", str(tmp_path))
    assert found.path == found.tokenizer_path == tmp_path / "0_Transformer"
    assert (found.modules_path, found.modules_folder, found.config) == (tmp_path, tmp_path, LLAMA)
    entries[0]["path"] = "../m"
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match="outside of the folder"):
        find("--model", str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such", "./no", "a/b/c", "../m", "what is this"])
def test_an_invalid_hub_name_is_a_missing_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        find("--model", name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"is a file; the folder that holds it is needed"):
        find("--model", str(tmp_path / "model.safetensors"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise hub.HTTPError("connection refused\nand more")

    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)


@pytest.mark.usefixtures("offline")
def test_without_network_it_says_so_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find("--model", "org/name", "--download-dir", str(tmp_path))
    assert str(error.value) == (
        "model org/name: not on this machine, and the hub cannot be reached (connection refused); "
        "give a local folder, or `demo` for the shipped model"
    )


@pytest.mark.parametrize(
    ("flags", "token"),
    [([], None), (["--hf-token", "hf_x"], "hf_x"), (["--hf-token"], True), (["--hf-token", "false"], False)],
)
def test_the_token_goes_to_the_hub(
    flags: list[str], token: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, used = tmp_path / "snapshot", []

    def info(api: hub.HfApi, *args: object, **kwargs: object) -> SimpleNamespace:
        used.append(api.token)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.safetensors")])

    def download(*args: object, token: object, **kwargs: object) -> str:
        used.append(token)
        return folder(store)

    monkeypatch.setattr(hub.HfApi, "model_info", info)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert find("--model", "org/gated", *flags).path == store
    assert used == [token, token]


@pytest.mark.usefixtures("offline")
def test_without_network_an_earlier_download_serves(tmp_path: Path) -> None:
    store = tmp_path / "models--org--name"
    folder(store / "snapshots" / "abc")
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("abc")
    assert find("--model", "org/name", "--download-dir", str(tmp_path)).path == store / "snapshots" / "abc"


@pytest.mark.parametrize(
    ("files", "load_format", "ignore", "patterns"),
    [
        (["a.safetensors", "b.bin"], "auto", [], hub.SAFETENSORS),
        (["b.bin"], "auto", [], hub.TORCH),
        (["original/a.safetensors", "b.bin"], "auto", ["original/*"], hub.TORCH),
        (["a.safetensors"], "pt", [], hub.TORCH),
        (["b.bin"], "safetensors", [], hub.SAFETENSORS),
        (["a.safetensors"], "dummy", [], ()),
    ],
)
def test_one_weight_format_is_fetched(
    files: list[str], load_format: str, ignore: list[str], patterns: tuple[str, ...]
) -> None:
    assert hub.weight_patterns(files, load_format, ignore) == patterns


def write_adapter(folder: Path, rank: int = 4, module: str = "self_attn.q_proj", **config: object) -> Path:
    folder.mkdir()
    known = {"peft_type": "LORA", "r": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    name = f"base_model.model.model.layers.0.{module}"
    a, b = np.ones((rank, 8), np.float32), np.ones((8, rank), np.float32)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    return folder


def error_of_adapter(path: Path | str) -> str:
    with pytest.raises(ConfigError) as error:
        find("--model", "demo", "--lora-modules", f"fr={path}")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_adapters_of_the_start_are_checked_without_their_weights(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good", 16)
    assert [source.path for source in find("--model", "demo", "--lora-modules", f"a={good}").adapters] == [str(good)]
    assert error_of_adapter("/none") == "adapter fr: path /none: no such folder, and not a valid hub name"
    big = write_adapter(tmp_path / "big", 17)
    weights = big / "adapter_model.safetensors"
    assert error_of_adapter(big) == (
        f"adapter fr: {big}: {weights.name}: rank 17 for model.layers.0.self_attn.q_proj; --max-lora-rank is 16"
    )
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-4])
    assert error_of_adapter(big) == f"adapter fr: {big}: {weights.name} has {size - 4} bytes, its header says {size}"
    weights.write_bytes(b"")
    assert error_of_adapter(big).startswith(f"adapter fr: {big}: {weights.name} is not a safetensors file: ")
    weights.unlink()
    assert (
        error_of_adapter(big)
        == f"adapter fr: {big}: the folder has neither adapter_model.safetensors nor adapter_model.bin"
    )
    dora = write_adapter(tmp_path / "dora", use_dora=True)
    assert error_of_adapter(dora).startswith(f"adapter fr: {dora}: adapter_config.json: use_dora True is not served")
    (dora / "adapter_config.json").unlink()
    assert error_of_adapter(dora) == f"adapter fr: {dora}: the folder has no adapter_config.json"


def test_whether_adapters_of_the_start_change_experts(tmp_path: Path) -> None:
    """Workers on a GPU have room for them in places then."""
    dense = write_adapter(tmp_path / "dense", 4)
    single = write_adapter(tmp_path / "single", 4, "mlp.experts.3.up_proj")
    stack = write_adapter(tmp_path / "stack", 4, "mlp.experts.base_layer", target_parameters=["mlp.experts.down_proj"])
    flags = [f"{path.name}={path}" for path in (dense, single, stack)]
    found = find("--model", "demo", "--lora-modules", *flags).adapters
    assert [source.has_experts for source in found] == [False, True, True]


def test_a_user_without_home_has_the_hubs_cache_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, caches = Path(folder(tmp_path / "m")), []
    monkeypatch.setattr(hub, "download", lambda *_, folder, **__: (caches.append(folder), made)[1])
    for name in model_files.HUB_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    find("--model", "org/model")
    monkeypatch.setattr(model_files, "home_variables", lambda: {"HOME": "/none"})
    find("--model", "org/model")
    find("--model", "org/model", "--download-dir", "/own")
    monkeypatch.setenv("HF_HOME", "/set")
    find("--model", "org/model")
    assert caches == [None, "/none/.cache/huggingface/hub", "/own", None]
