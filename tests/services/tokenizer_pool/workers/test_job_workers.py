"""Jobs above the limits end only their text worker: real processes, real limits."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from text_rig import TextRig, children_with, text_rig
from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool.workers import job_workers
from blockyard.services.tokenizer_pool.workers.job_limits import NUM_WORKERS, JobLimits
from blockyard.services.tokenizer_pool.workers.job_queue import MAX_KILLED
from blockyard.services.tokenizer_pool.workers.job_workers import MAX_STARTS
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import TAKES_LONG, Detokenize, TextRejected, Tokenize, Tokenized
from blockyard.shared.token_ids import pack

MESSAGES = b'[{"role": "user", "content": "the fox"}]'
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUNGRY = "".join("{% set " + name + " = [[1]] * 4000000 %}" for name in "abcd") + ENDLESS  # 128 MB
LONG = JobLimits(render_cpu_s=60.0, silence_s=1.0, encode_cpu_s=0.1)

BOMBS = {
    "sum of lists": "{{ ([[1]] * 4000000) | sum(start=[]) }}",
    "title": "{{ ('a b ' * 1000000) | title | title | title | title | title | title | length }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat reversed": "{{ 10**10 * 'a' }}",
    "list": "{{ [0] * 10**10 }}",
    "power": "{{ 10 ** (10**10) }}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "center": "{{ 'a'.center(10**10) }}",
    "center filter": "{{ 'a' | center(99999999999) }}",
    "format": "{{ '%99999999999d' % 1 }}",
    "str.format": "{{ '{:99999999999}'.format(1) }}",
    "joined": "{{ range(99999) | map('string') | list | join('a' * 999999) }}",
    "replaced": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "macros": "{% macro a(n) %}{% for i in range(9) %}{{ a(n-1) if n else 'x' }}{% endfor %}{% endmacro %}{{ a(40) }}",
    "tojson": "{{ [[[[1]]]] | tojson(indent=10**9) }}",
    "sort": "{{ ('ab' * 7000000) | list | sort | length }}",
    "urlize": "{{ ('a@b.c ' * 2000000) | urlize | length }}",
    "wordwrap": "{{ ('a b ' * 3000000) | wordwrap(20) | length }}",
    "pprint": "{{ (range(90000) | list) | pprint }}{% for i in range(90000) %}{{ range(90000) | list }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**6) }}",
}


def bomb(name: str) -> Tokenize:
    return Tokenize(name, "m", messages=MESSAGES, chat_template=BOMBS[name])


def text(name: str) -> Tokenize:
    return Tokenize(name, "m", text="the quick fox")


def quick(name: str) -> Tokenize:
    return Tokenize(name, "m", text="the quick fox", quick=True)


def slow(name: str, cpu_s: float, tenant: str = "") -> Tokenize:
    """A template of about so much CPU time."""
    template = (
        "{% for i in range(" + str(int(cpu_s * 1000)) + ") %}{% for j in range(20000) %}{% endfor %}{% endfor %}x"
    )
    return Tokenize(name, "m", messages=MESSAGES, chat_template=template, tenant=tenant)


def has_grown(pid: int) -> bool:
    """Whether a worker holds what HUNGRY makes."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") > 120 << 20
    except (OSError, IndexError):
        return False


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def rig(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextRig]:
    folder = tmp_path_factory.mktemp("tokenizer")
    with text_rig(folder, byte_tokenizer, chat_template=TEMPLATE, trust_request_chat_template=True) as made:
        yield made


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_costs_too_much_is_rejected(rig: TextRig, name: str) -> None:
    answers = rig.ask(bomb(name), text("next"), Tokenize("chat", "m", messages=MESSAGES, want_text=True))
    rejected, after, chat = answers
    assert isinstance(rejected, TextRejected), name
    assert (rejected.request_id, rejected.field) == (name, "messages") and rejected.message
    assert isinstance(after, Tokenized) and isinstance(chat, Tokenized)
    assert (after.request_id, chat.text) == ("next", "user: the fox")


def test_the_job_that_ended_a_worker_is_not_given_to_the_next_one(rig: TextRig) -> None:
    before = rig.settle()
    answers = rig.ask(text("a"), bomb("sum of lists"), text("b"), text("c"))
    assert [(a.request_id, type(a)) for a in answers] == [
        ("a", Tokenized),
        ("sum of lists", TextRejected),
        ("b", Tokenized),
        ("c", Tokenized),
    ]
    (rejected,) = (a for a in answers if isinstance(a, TextRejected))
    assert "takes more than 0.2 s of CPU time" in rejected.message
    assert rig.settle() != before  # one worker was lost


def test_a_text_that_takes_long_to_encode_is_rejected(rig: TextRig) -> None:
    huge = Tokenize("huge", "m", text="".join(map(chr, range(33, 0x2FFF))) * 60)
    rejected, after = rig.ask(huge, text("next"))
    assert isinstance(rejected, TextRejected) and "tokenize" in rejected.message and rejected.field == "prompt"
    assert isinstance(after, Tokenized)
    ids = Detokenize("ids", "m", pack([300] * 20_000_000))
    rejected, after = rig.ask(ids, text("next"))
    assert isinstance(rejected, TextRejected) and rejected.field == "tokens"
    assert isinstance(after, Tokenized)


def test_a_worker_that_grew_is_replaced_after_its_answer(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with text_rig(tmp_path, byte_tokenizer, JobLimits(growth_bytes=8 << 20)) as rig:
        before = rig.settle()
        assert isinstance(rig.ask(text("small"))[0], Tokenized) and rig.settle() == before
        answers = rig.ask(Tokenize("large", "m", text="the fox " * 150_000), text("next"))
        assert [type(a) for a in answers] == [Tokenized, Tokenized]
        assert rig.settle() != before


def test_a_worker_that_is_stopped_costs_its_job_a_second_run(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with text_rig(tmp_path, byte_tokenizer, LONG, chat_template=TEMPLATE, trust_request_chat_template=True) as rig:
        before = rig.settle()
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        (answer,) = rig.ask(text("stopped"))
        assert isinstance(answer, Tokenized) and rig.settle() != before


def test_kills_of_its_workers_fail_no_job_however_many_they_are(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    patient = msgspec.structs.replace(LONG, silence_s=20.0)
    with text_rig(tmp_path, byte_tokenizer, patient, chat_template=TEMPLATE, trust_request_chat_template=True) as rig:
        rig.settle()
        killed: set[int] = set()

        async def kill_all() -> None:
            rig.workers.submit(1, slow("slow", 1.0))
            while len(killed) < 4 * MAX_KILLED:
                await asyncio.sleep(0.05)
                for pid in set(rig.workers.worker_pids) - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)

        rig.answers.clear()
        rig.run(kill_all())
        (answer,) = rig.wait(1)
        assert isinstance(answer, Tokenized)


def test_a_job_whose_worker_is_killed_while_it_takes_much_memory_fails(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The kernel kills it so when memory runs out. With each further run it might choose another process."""
    limits = msgspec.structs.replace(LONG, growth_bytes=64 << 20)
    with text_rig(tmp_path, byte_tokenizer, limits, chat_template=TEMPLATE, trust_request_chat_template=True) as rig:
        rig.settle()
        hungry = Tokenize("hungry", "m", messages=MESSAGES, chat_template=HUNGRY)
        killed: set[int] = set()

        async def kill_what_grows() -> None:
            rig.workers.submit(1, hungry)
            while not rig.answers:
                await asyncio.sleep(0.005)
                for pid in set(rig.workers.worker_pids) - killed:
                    if has_grown(pid):
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)

        rig.answers.clear()
        rig.run(asyncio.wait_for(kill_what_grows(), 60))
        (answer,) = rig.wait(1)
        assert isinstance(answer, TextRejected) and "memory" in answer.message and len(killed) == MAX_KILLED
        assert isinstance(rig.ask(text("next"))[0], Tokenized)


def test_a_job_for_a_worker_that_has_just_ended_goes_to_the_next_one(rig: TextRig) -> None:
    for _ in range(10):
        before = rig.settle()

        async def kill_and_submit(pids: list[int]) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)  # the end of its stream is not read yet
            for i in range(4):
                rig.workers.submit(1, quick(f"{i}"))

        rig.answers.clear()
        rig.run(kill_and_submit(before))
        assert all(isinstance(answer, Tokenized) for answer in rig.wait(4))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_the_fork_server_costs_no_answer(
    byte_tokenizer: Tokenizer, tmp_path: Path, number: signal.Signals
) -> None:
    """All jobs are answered, those at workers and those that wait, and the workers end with their server."""
    with text_rig(tmp_path, byte_tokenizer, LONG, chat_template=TEMPLATE, trust_request_chat_template=True) as rig:
        before, server = rig.settle(), rig.server()

        async def submit_and_kill() -> None:
            for i in range(40):
                rig.workers.submit(1, quick(f"quick {i}") if i % 2 else slow(f"{i}", 0.02))
            os.kill(server, number)
            if number == signal.SIGSTOP:  # a server that stands still is noticed when it replaces no worker
                os.kill(before[0], signal.SIGKILL)

        rig.answers.clear()
        rig.run(submit_and_kill())
        answers = rig.wait(40)
        assert {type(answer) for answer in answers} == {Tokenized} and len({a.request_id for a in answers}) == 40
        rig.until(lambda: not any(map(is_alive, [server, *before])))
        assert not set(rig.settle()) & set(before) and not rig.serving.done()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_workers_and_servers_cost_no_answer(
    byte_tokenizer: Tokenizer, tmp_path: Path, number: signal.Signals
) -> None:
    with text_rig(tmp_path, byte_tokenizer, LONG, chat_template=TEMPLATE, trust_request_chat_template=True) as rig:
        before, server = rig.settle(), rig.server()

        async def submit_and_end() -> None:
            for i in range(8):
                rig.workers.submit(1, slow(f"{i}", 0.1))
            await asyncio.sleep(0.05)
            for pid in (*before, server):
                os.kill(pid, number)
                await asyncio.sleep(0.2)

        rig.answers.clear()
        rig.run(submit_and_end())
        assert {type(answer) for answer in rig.wait(8)} == {Tokenized}


def end_servers(rig: TextRig, number: signal.Signals, times: int) -> None:
    """Ends the fork server, and so many more while they load, with eight jobs waiting."""
    ended = {rig.server()}

    async def submit_and_end() -> None:
        for i in range(8):
            rig.workers.submit(1, quick(f"{i}"))
        os.kill(min(ended), number)
        while len(ended) <= times:
            await asyncio.sleep(0.01)
            for pid in set(children_with("text_worker")) - ended:
                os.kill(pid, number)
                ended.add(pid)

    rig.answers.clear()
    rig.run(asyncio.wait_for(submit_and_end(), 60))


def test_kills_of_servers_that_still_load_cost_no_answer(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with text_rig(tmp_path, byte_tokenizer, LONG) as rig:
        end_servers(rig, signal.SIGKILL, 2 * MAX_STARTS)
        assert {type(answer) for answer in rig.wait(8)} == {Tokenized} and not rig.serving.done()


def test_kills_of_a_server_that_loads_slowly_count_from_the_first_kill(
    byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_workers, "KILLED_S", 1.0)
    with text_rig(tmp_path, byte_tokenizer, LONG) as rig:
        ended = {rig.server()}

        async def kill_slow_servers() -> None:
            os.kill(min(ended), signal.SIGKILL)
            for i in range(MAX_STARTS):
                while not (loading := set(children_with("text_worker")) - ended):
                    await asyncio.sleep(0.005)
                if i == 0:
                    os.kill(min(loading), signal.SIGSTOP)
                    await asyncio.sleep(1.2)
                os.kill(min(loading), signal.SIGKILL)
                ended.update(loading)

        rig.run(asyncio.wait_for(kill_slow_servers(), 60))
        assert isinstance(rig.ask(text("next"))[0], Tokenized) and not rig.serving.done()


def test_a_server_that_crashes_while_it_loads_is_not_started_for_ever(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with text_rig(tmp_path, byte_tokenizer, LONG) as rig:
        end_servers(rig, signal.SIGSEGV, MAX_STARTS)
        rig.until(rig.serving.done)
        with pytest.raises(BlockyardError, match=f"ended {MAX_STARTS} times before it had loaded"):
            rig.serving.result()


def test_the_server_reaps_its_workers_and_keeps_two(rig: TextRig) -> None:
    server, workers = rig.server(), rig.settle()
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    assert sorted(map(int, children)) == sorted(workers) and len(workers) == NUM_WORKERS


def test_quick_jobs_wait_for_no_long_ones_and_tenants_take_turns(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """40 templates of a tenant wait: plain chats of another one, and its own template, are done long before them."""
    with text_rig(tmp_path, byte_tokenizer, LONG, chat_template=TEMPLATE, trust_request_chat_template=True) as rig:
        rig.settle()
        for i in range(40):
            rig.run(rig.submit(slow(f"a{i}", 0.1, tenant="key-1")))
        chats = [msgspec.structs.replace(quick(f"chat {i}"), messages=MESSAGES, text=None) for i in range(5)]
        for chat in chats:
            rig.run(rig.submit(msgspec.structs.replace(chat, tenant="key-2")))
        rig.run(rig.submit(slow("b", 0.1, tenant="key-2")))
        order = [answer.request_id for answer in rig.wait(46)]
        before_b = order[: order.index("b")]
        assert {chat.request_id for chat in chats} < set(before_b)
        assert sum(name.startswith("a") for name in before_b) <= 3
        assert [name for name in order if name.startswith("a")] == [f"a{i}" for i in range(40)]


def test_a_quick_job_that_takes_long_is_sent_back(rig: TextRig) -> None:
    """The gateway asks again for a long one, which may take all of the time."""
    job = msgspec.structs.replace(bomb("nested loops"), quick=True)
    (back,) = rig.ask(job)
    assert isinstance(back, TextRejected) and back.code == TAKES_LONG
    (rejected,) = rig.ask(msgspec.structs.replace(job, quick=False))
    assert isinstance(rejected, TextRejected) and not rejected.code
