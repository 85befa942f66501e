"""What a server says of its settings: flags without secrets, and its tokenizer."""

import msgspec
import pytest

from blockyard.shared.config.parsed_flags import Values, from_mapping
from blockyard.shared.config.server import server_info
from blockyard.shared.errors import ConfigError


def values(**flags: object) -> Values:
    return Values(from_mapping(flags, "test"))


async def test_the_flags_of_the_server(rig) -> None:
    info = msgspec.json.encode(server_info.shown_flags(values(port=81, api_key=["sk-0815"], model="m"))).decode()
    async with rig(server_info=info) as r:
        async with r.http.get("/server_info?config_format=json") as response:
            assert response.status == 200
            answer = await response.json()
        async with r.http.get("/server_info") as response:
            text = await response.text()
            assert (await response.json())["vllm_config"].startswith("models=")
        async with r.http.get("/server_info?config_format=yaml") as response:
            assert response.status == 400 and (await response.json())["error"]["param"] == "config_format"
    config = answer["vllm_config"]
    assert (config["port"], config["model"], config["max_num_seqs"], config["api_key"]) == (81, "m", None, "***")
    assert config["models"][0]["names"] == ["tiny", "tiny-alias"] and "sk-0815" not in text
    assert answer["system_env"]["python"].startswith("3.")


async def test_the_variables_of_the_environment_are_shown_without_secrets(rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKYARD_API_KEY", "hidden")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    async with rig() as r, r.http.get("/server_info") as response:
        text = await response.text()
    assert "hidden" not in text and '"HF_HUB_OFFLINE":"1"' in text


async def test_it_is_for_operators(rig) -> None:
    async with rig(api_keys=["user"], admin_keys=["admin"]) as r:
        for key, status in (("user", 401), ("admin", 200)):
            async with r.http.get("/server_info", headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status in ((401, 403) if status != 200 else (200,))


async def test_the_tokenizer(rig) -> None:
    async with rig(tokenizer_info=True) as r:
        for query in ("", "?model=tiny-alias"):
            async with r.http.get(f"/tokenizer_info{query}") as response:
                assert (await response.json())["tokenizer_class"] == "Bytes"
        async with r.http.get("/tokenizer_info?model=other") as response:
            assert response.status == 404
    async with rig() as r, r.http.get("/tokenizer_info") as response:
        assert response.status == 404


def test_the_fingerprint_changes_with_what_changes_answers() -> None:
    def of(**flags: object) -> str:
        return server_info.fingerprint(values(**flags))

    plain = of(model="m")
    assert plain.startswith("blockyard-") and plain == of(model="m", port=82, api_key=["x"], served_model_name=["y"])
    assert len({plain, of(model="n"), of(model="m", dtype="float16"), of(model="m", fingerprint_mode="none")}) == 4
    assert of(fingerprint_mode="custom", fingerprint_value="mine") == "mine"
    assert of(fingerprint_mode="hash", model="m").count("-") == plain.count("-")
    for wrong in ({"fingerprint_mode": "custom"}, {"fingerprint_value": "x"}):
        with pytest.raises(ConfigError, match="belong together"):
            of(**wrong)
