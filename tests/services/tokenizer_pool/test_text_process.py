"""Jobs above the limits end only their text worker: real processes, real limits."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_rig import TextRig, text_rig
from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool.job_limits import JobLimits
from blockyard.services.tokenizer_pool.text_process import TextProcess
from blockyard.services.tokenizer_pool.worker_frames import TokenizerLoaded, WorkerEnded, WorkerStarted, encode
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import Detokenize, TextRejected, Tokenize, Tokenized
from blockyard.shared.token_ids import pack

MESSAGES = b'[{"role": "user", "content": "the fox"}]'
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
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


def test_a_worker_that_is_killed_or_stopped_costs_its_job_a_second_run(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with text_rig(tmp_path, byte_tokenizer, LONG, chat_template=TEMPLATE, trust_request_chat_template=True) as rig:
        os.kill(before := rig.settle(), signal.SIGSTOP)
        (answer,) = rig.ask(text("stopped"))
        assert isinstance(answer, Tokenized) and rig.settle() != before
        endless = Tokenize("endless", "m", messages=MESSAGES, chat_template=ENDLESS)
        killed: list[int] = []

        async def kill_twice() -> None:
            rig.process.submit(1, endless)
            while len(killed) < 2:
                await asyncio.sleep(0.1)
                pid = rig.process.worker_pid
                if pid is not None and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

        rig.answers.clear()
        rig.run(kill_twice())
        (answer,) = rig.wait(1)
        assert isinstance(answer, TextRejected) and answer.request_id == "endless"
        assert isinstance(rig.ask(text("next"))[0], Tokenized)


def test_the_end_of_the_fork_server_ends_the_service(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with text_rig(tmp_path, byte_tokenizer) as rig:
        worker = rig.settle()
        server = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(BlockyardError, match="fork server"):
            rig.run(rig.serving)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not Path(f"/proc/{worker}").exists()  # it ends with its server


def test_one_process_of_a_rig_is_left(rig: TextRig) -> None:
    """The fork server reaps all killed workers."""
    worker = rig.settle()
    server = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]
    assert Path(f"/proc/{server}/task/{server}/children").read_text().split() == [str(worker)]


def test_a_job_for_a_worker_that_has_just_ended_goes_to_the_next_one() -> None:
    """The write fails before the end of the stream is read. The test plays the fork server."""
    control, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start_worker(pid: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        socket.send_fds(server, [encode(WorkerStarted(pid))], [ours.fileno()])
        ours.close()
        return theirs

    async def check() -> None:
        process = TextProcess(control, JobLimits())
        server.send(encode(TokenizerLoaded([])))
        await process.load()
        process.submit(1, text("a"))
        start_worker(1).close()
        serving = asyncio.create_task(process.run(lambda peer, answer: None))
        await asyncio.sleep(0.05)
        server.send(encode(WorkerEnded(-9)))
        reader, writer = await asyncio.open_connection(sock=start_worker(2))
        await asyncio.wait_for(reader.readexactly(8), 5.0)
        assert not serving.done()
        serving.cancel()
        writer.close()
        await asyncio.wait([serving])

    asyncio.run(check())
    server.close()
