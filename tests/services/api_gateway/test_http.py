"""Keys, request ids, CORS, TLS, path prefixes, and the less common request and response fields."""

import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from fake_ring import CARD, member

from blockyard.services.api_gateway.server import tls_context
from blockyard.shared.config.services.gateway import CorsConfig, TlsConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Beam, BeamStop, Generate, ModelSettings, Role, SamplingDefaults, Tokenize
from blockyard.shared.token_ids import unpack

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]


async def test_request_ids_come_back(rig) -> None:
    async with rig(enable_request_id_headers=True) as r:
        async with r.http.post(COMPLETION, json={"prompt": "x"}, headers={"X-Request-Id": "mine-1"}) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
            assert (await response.json())["id"] == "cmpl-mine-1"
        body = {"prompt": "x", "stream": True}
        async with r.http.post(COMPLETION, json=body, headers={"X-Request-Id": "mine-2"}) as response:
            assert response.headers["X-Request-Id"] == "mine-2" and b"cmpl-mine-2" in await response.read()
        async with r.http.post(COMPLETION, json={}, headers={"X-Request-Id": "x" * 200}) as response:
            assert response.status == 400 and len(response.headers["X-Request-Id"]) == 32
    async with rig() as r, r.http.get("/live") as response:
        assert "X-Request-Id" not in response.headers


async def test_the_same_request_id_twice_is_two_requests(rig) -> None:
    async with rig() as r:
        for _ in range(2):
            status, _ = await r.post(COMPLETION, {"prompt": "x"}, headers={"X-Request-Id": "same"})
            assert status == 200
        assert len({f.request_id for f in r.ring.frames(Generate)}) == 2


async def test_routes_that_need_a_key(rig) -> None:
    async with rig(api_keys=["first", "second"], root_path="/llm") as r:
        for path in ("/v1/models", "/ring", "/llm/v1/models", "/llm/ring"):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
                async with r.http.get(path, headers=header) as response:
                    assert response.status == 401, path
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
            async with r.http.get(path, headers={"Authorization": "bearer second"}) as response:
                assert response.status == 200
        for path in ("/health", "/live", "/metrics", "/version"):
            async with r.http.get(path) as response:
                assert response.status == 200
        assert (await r.post("/tokenize", {"prompt": "x"}))[0] == 401
        await r.post(COMPLETION, {"prompt": "x"}, headers={"Authorization": "Bearer second"})
        assert r.ring.frames(Generate)[0].tenant == "key-1"


async def test_cors(rig) -> None:
    preflight = {
        "Origin": "http://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with rig() as r:
        async with r.http.options(CHAT, headers=preflight) as response:
            assert response.status == 200 and response.headers["Access-Control-Allow-Origin"] == "*"
            assert response.headers["Access-Control-Allow-Methods"] == "POST"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        body = {"prompt": "x", "stream": True}
        async with r.http.post(COMPLETION, json=body, headers={"Origin": "http://a.example"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "*"
        async with r.http.post(COMPLETION, json={}, headers={"Origin": "http://a.example"}) as response:
            assert response.status == 400 and response.headers["Access-Control-Allow-Origin"] == "*"
    cors = CorsConfig(allowed_origins=["http://b.example"], allow_credentials=True, allowed_headers=["x-a"])
    async with rig(cors=cors) as r:
        async with r.http.options(CHAT, headers=preflight) as response:
            assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers
        async with r.http.options(CHAT, headers=preflight | {"Origin": "http://b.example"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "http://b.example"
            assert response.headers["Access-Control-Allow-Credentials"] == "true"
            assert response.headers["Access-Control-Allow-Headers"] == "x-a"


async def test_root_path_with_and_without(rig) -> None:
    async with rig(root_path="/llm/") as r:
        for path in ("/v1/models", "/llm/v1/models"):
            async with r.http.get(path) as response:
                assert response.status == 200
        assert (await r.post("/llm" + COMPLETION, {"prompt": "x"}))[0] == 200


@pytest.fixture
def key_files(tmp_path: Path) -> TlsConfig:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return TlsConfig(keyfile=str(key), certfile=str(cert))


async def test_tls(rig, key_files: TlsConfig) -> None:
    async with rig(tls=key_files) as r:
        trusting = ssl.create_default_context(cafile=key_files.certfile)
        trusting.check_hostname = False
        async with aiohttp.ClientSession(f"https://127.0.0.1:{r.port}") as http:
            body = {"prompt": "x", "stream": True, "max_tokens": 3}
            async with http.post(COMPLETION, json=body, ssl=trusting) as response:
                assert response.status == 200 and (await response.text()).count("data: ") == 4
            async with http.post("/pause", ssl=trusting) as response:  # an operator on this machine
                assert response.status == 200


def test_tls_files_that_are_not_there(key_files: TlsConfig) -> None:
    with pytest.raises(ConfigError, match="ssl-certfile /nowhere"):
        tls_context(TlsConfig(keyfile=key_files.keyfile, certfile="/nowhere"))
    Path(key_files.certfile).write_text("no certificate")
    with pytest.raises(ConfigError):
        tls_context(key_files)


async def test_the_port_in_use_is_one_line(rig) -> None:
    async with rig() as r:
        with pytest.raises(ConfigError, match=f"port {r.port} is in use"):
            async with rig(port=r.port):
                pass


async def test_lm_eval_asks_for_the_prompts_log_probabilities(rig) -> None:
    """echo, max_tokens 0, logprobs, prompts as ids."""
    async with rig() as r:
        body = {"model": "tiny", "prompt": [[97, 98, 99], [100]], "echo": True, "max_tokens": 0, "logprobs": 2}
        status, answer = await r.post(COMPLETION, body | {"temperature": 0, "seed": 1234})
        assert all(f.sampling.max_tokens == 1 for f in r.ring.frames(Generate))
    assert status == 200
    first, second = answer["choices"]
    assert (first["text"], first["finish_reason"], second["text"]) == ("abc", "length", "d")
    assert first["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.5, -1.5],
        "top_logprobs": [None, {"b": -1.5, "\x01": -0.5}, {"c": -1.5, "\x01": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert second["logprobs"]["token_logprobs"] == [None]
    details = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4} | details


async def test_prompt_logprobs_and_token_ids(rig) -> None:
    async with rig() as r:
        body = {"prompt": "abc", "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
        _, answer = await r.post(COMPLETION, body)
        _, chat = await r.post(CHAT, {"messages": USER, "max_tokens": 2, "prompt_logprobs": 0})
    [choice] = answer["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        "1": {"logprob": -0.5, "rank": 1, "decoded_token": "\x01"},
    }
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98], [97, 98, 99])
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


async def test_every_sampling_field_reaches_the_scheduler(rig) -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": -1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "logit_bias": {"7": 1.5},
        "bad_words": ["no"],
        "allowed_token_ids": [9, 8, 9],
        "stop": "end",
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "return_tokens_as_token_ids": True,
        "priority": -3,
        "user": "ann",
        "cache_salt": "pepper",
        "add_special_tokens": False,
    }
    async with rig() as r:
        await r.post(COMPLETION, {"prompt": "x", "max_tokens": 3, "logprobs": 4} | body)
        [frame], [tokenize] = r.ring.frames(Generate), r.ring.frames(Tokenize)
    s = frame.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.5, 0.9, 7, 0.1, 1.1)
    assert (s.presence_penalty, s.frequency_penalty, s.seed, s.min_tokens, s.ignore_eos) == (
        0.2,
        -0.3,
        2**64 - 1,
        1,
        True,
    )
    assert (s.stop_token_ids, s.logit_bias, s.bad_words, s.allowed_token_ids) == ([5], [(7, 1.5)], [[110, 111]], [8, 9])
    assert (s.max_tokens, s.num_logprobs, s.num_prompt_logprobs) == (3, 4, None)
    t = frame.text
    assert (t.stop, t.include_stop, t.skip_special_tokens, t.spaces_between_special_tokens) == (
        ["end"],
        True,
        False,
        False,
    )
    assert (t.tokens_as_ids, t.min_tokens) == (True, 1)
    assert (frame.priority, frame.user, frame.cache_salt, tokenize.cache_salt, tokenize.add_special_tokens) == (
        -3,
        "ann",
        "pepper",
        "pepper",
        False,
    )


async def test_choices_and_beams_reach_the_scheduler(rig) -> None:
    beams = {"n": 2, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": True, "temperature": 0}
    async with rig() as r:
        _, best = await r.post(COMPLETION, {"prompt": "x", "max_tokens": 3, "n": 2, "best_of": 5})
        await r.post(COMPLETION, {"prompt": "x", "max_tokens": 3} | beams)
        first, second = r.ring.frames(Generate)
    assert (len(first.choices), first.beam, first.sampling.num_logprobs, len(best["choices"])) == (5, None, 0, 2)
    assert (len(second.choices), second.beam) == (2, Beam(2, 0.5, BeamStop.FIRST))


async def test_defaults_of_the_deployment(rig) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=50)
    async with rig(defaults=defaults) as r:
        await r.post(CHAT, {"messages": USER})
        await r.post(CHAT, {"messages": USER, "temperature": 0, "top_k": -1, "max_tokens": 80})
        await r.post(COMPLETION, {"prompt": "x"})
        a, b, c = (f.sampling for f in r.ring.frames(Generate))
    assert (a.temperature, a.top_k, a.top_p, a.max_tokens) == (0.6, 20, 0.95, 50)
    assert (b.temperature, b.top_k, b.max_tokens, c.max_tokens) == (0.0, 0, 50, 16)
    assert len({a.seed, b.seed, c.seed}) == 3


async def test_a_chat_without_max_tokens_may_fill_the_context(rig) -> None:
    async with rig() as r:
        status, answer = await r.post(CHAT, {"messages": USER})
        [frame] = r.ring.frames(Generate)
    assert status == 200 and len(frame.prompt_ids) // 4 + frame.sampling.max_tokens == CARD.max_model_len
    assert answer["usage"]["total_tokens"] == CARD.max_model_len


@pytest.mark.parametrize("asked", [253, 10**6, 10**30])
async def test_more_tokens_than_the_context_leaves_are_clamped(rig, asked: int) -> None:
    async with rig() as r:
        for path, body in (
            (COMPLETION, {"prompt": "four", "max_tokens": asked}),
            (CHAT, {"messages": USER, "max_completion_tokens": asked}),
        ):
            status, answer = await r.post(path, body)
            assert status == 200 and answer["usage"]["total_tokens"] == CARD.max_model_len
            assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_that_fills_the_context_is_echoed_and_scored(rig) -> None:
    async with rig() as r:
        body = {"prompt": [[97] * 256, [98]], "echo": True, "max_tokens": 0, "logprobs": 1}
        status, answer = await r.post(COMPLETION, body)
        assert [f.sampling.max_tokens for f in r.ring.frames(Generate)] == [0, 1]
        assert status == 200 and [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [256, 1]
        events = await r.events(COMPLETION, body | {"logprobs": None})
        shown = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == 0]
        assert "".join(c["text"] for c in shown) == "a" * 256 and shown[-1]["finish_reason"] == "length"
        status, answer = await r.post(COMPLETION, {"prompt": [97] * 256, "max_tokens": 1})
        assert status == 400 and "256 input tokens" in answer["error"]["message"]
        assert "length is 256" in answer["error"]["message"] and "at least one" in answer["error"]["message"]


async def test_prompts_without_a_seed_draw_differently(rig) -> None:
    async with rig() as r:
        await r.post(COMPLETION, {"prompt": ["x", "x"]})
        await r.post(COMPLETION, {"prompt": ["x", "x"], "seed": 7})
        a, b, c, d = (f.sampling.seed for f in r.ring.frames(Generate))
    assert a != b and c == d == 7


async def test_truncation_keeps_the_end(rig) -> None:
    async with rig() as r:
        _, answer = await r.post(COMPLETION, {"prompt": "x" * 400 + "abc", "truncate_prompt_tokens": 3, "echo": True})
        [frame] = r.ring.frames(Generate)
    assert unpack(frame.prompt_ids) == [97, 98, 99] and answer["choices"][0]["text"].startswith("abcw0 ")


async def test_truncation_of_the_right_side_keeps_the_start(rig) -> None:
    kept = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    async with rig() as r:
        _, answer = await r.post(COMPLETION, {"prompt": "abc" + "x" * 400, "echo": True} | kept)
        await r.post(COMPLETION, {"prompt": [97, 98, 99] + [120] * 400} | kept)
        status, error = await r.post(COMPLETION, {"prompt": "a", "suffix": "b"} | kept)
        wrong = [(await r.post(COMPLETION, {"prompt": "a", "truncation_side": side}))[0] for side in ("middle", 1, [])]
        frames = r.ring.frames(Generate)
    assert [unpack(frame.prompt_ids) for frame in frames] == [[97, 98, 99]] * 2
    assert answer["choices"][0]["text"].startswith("abcw0 ")
    assert (status, error["error"]["param"], wrong) == (400, "truncation_side", [400] * 3)


async def test_parts_stay_parts_and_templates_get_their_arguments(rig) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with rig() as r:
        body = {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "joe"}],
            "chat_template_kwargs": {"thinking": True},
            "chat_template": "{{ messages }}",
            "documents": [{"title": "t"}],
        }
        assert (await r.post(CHAT, body))[0] == 200
        end = {"messages": [*USER, {"role": "assistant", "content": "so"}], "continue_final_message": True}
        assert (await r.post(CHAT, end))[0] == 200
        first, second = r.ring.frames(Tokenize)
    assert msgspec.json.decode(first.messages) == body["messages"]
    assert msgspec.json.decode(first.template_kwargs) == {"thinking": True, "documents": [{"title": "t"}]}
    assert first.chat_template == "{{ messages }}" and first.add_generation_prompt
    assert second.continue_final_message and not second.add_generation_prompt


async def test_any_role_goes_to_the_template(rig) -> None:
    async with rig() as r:
        body = {"messages": [{"role": "critic", "content": "hm"}, *USER]}
        assert (await r.post(CHAT, body))[0] == 200
        [frame] = r.ring.frames(Tokenize)
    assert frame.messages == b'[{"role":"critic","content":"hm"},{"role":"user","content":"hi"}]'


async def test_a_body_may_begin_with_a_byte_order_mark(rig) -> None:
    async with rig() as r:
        for path, body in ((CHAT, b'{"messages":[{"role":"user","content":"hi"}]}'), ("/tokenize", b'{"prompt":"x"}')):
            assert (await r.post(path, b"\xef\xbb\xbf" + body))[0] == 200


async def test_usage_details(rig) -> None:
    async with rig(enable_prompt_tokens_details=True) as r:
        _, answer = await r.post(COMPLETION, {"prompt": "hello"})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_tokenize_and_detokenize(rig) -> None:
    async with rig() as r:
        _, answer = await r.post("/tokenize", {"model": "tiny", "prompt": "hey", "return_token_strs": True})
        assert answer == {"count": 3, "max_model_len": 256, "tokens": [104, 101, 121], "token_strs": ["h", "e", "y"]}
        _, answer = await r.post("/tokenize", {"messages": USER})
        assert answer["count"] == len('[{"role":"user","content":"hi"}]')
        _, answer = await r.post("/detokenize", {"model": "tiny", "tokens": [104, 105]})
        assert answer == {"prompt": "hi"}


async def test_two_models(rig) -> None:
    async with rig() as r:
        other = type(CARD)(["other"], "/models/other", 128, 300, 5)
        scheduler = member(Role.SCHEDULER, 55, card=other)
        r.ring.join(type(scheduler)(scheduler.name, scheduler.role, 55, "ipc:///55", "other", True, card=other))
        r.ring.join(type(scheduler)("tokenizer_pool 1", Role.TOKENIZER_POOL, 56, "ipc:///56", "other", True))
        status, answer = await r.post(COMPLETION, {"prompt": "x"})
        assert (status, answer["error"]["param"]) == (400, "model")
        _, answer = await r.post(COMPLETION, {"prompt": "x", "model": "other"})
        assert answer["model"] == "other"
        assert [to for to, f in r.ring.sent if isinstance(f, Tokenize | Generate)] == [56, 55]
        _, answer = await r.post(COMPLETION, {"prompt": "x", "model": "tiny-alias"})
        assert answer["model"] == "tiny"


async def test_each_model_has_its_own_settings(rig) -> None:
    other = ModelSettings(SamplingDefaults(temperature=0.2), response_role="bot", max_logprobs=1)
    card = msgspec.structs.replace(CARD, names=["other"], settings=other)
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    async with rig(defaults=SamplingDefaults(temperature=0.6)) as r:
        for role, incarnation in ((Role.TOKENIZER_POOL, 21), (Role.SCHEDULER, 22)):
            r.ring.join(msgspec.structs.replace(member(role, incarnation, card=card), model="other"))
        _, first = await r.post("/v1/chat/completions", asked | {"model": "tiny"})
        status, refused = await r.post("/v1/chat/completions", asked | {"model": "other"})
        _, second = await r.post("/v1/chat/completions", asked | {"model": "other", "top_logprobs": 1})
        frames = {f.model: f.sampling.temperature for f in r.ring.frames(Generate) if isinstance(f, Generate)}
    assert frames == {"tiny": 0.6, "other": 0.2}
    assert [a["choices"][0]["message"]["role"] for a in (first, second)] == ["assistant", "bot"]
    assert (status, refused["error"]["param"]) == (400, "top_logprobs")
