"""Grammars of clients are checked in a process that may be killed: real processes, real limits."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from text_rig import parent_of, text_config
from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool import grammar_checks
from blockyard.services.tokenizer_pool.grammar_checks import MAX_WAITING, GrammarChecks, Verdict
from blockyard.services.tokenizer_pool.workers.fork_server import ServerSettings
from blockyard.services.tokenizer_pool.workers.job_limits import MIB, NUM_WORKERS, JobLimits
from blockyard.services.tokenizer_pool.workers.job_workers import JobWorkers
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import BUSY, TAKES_LONG, Grammar, GrammarEngine, GrammarKind, TextRejected, Tokenize
from blockyard.shared.process.settings import LOW_PRIORITY

LIMITS = JobLimits(check_cpu_s=0.15, memory_bytes=512 * MIB, memory_bytes_per_token=0)
LIMIT_S = 100.0
EOS = [1, 3]
OTHER_ENGINES = (GrammarEngine.XGRAMMAR, GrammarEngine.OUTLINES, GrammarEngine.LM_FORMAT_ENFORCER)
BEYOND_GUIDANCE = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}


class CheckRig:
    def __init__(self, runner: asyncio.Runner, checks: GrammarChecks) -> None:
        self.runner, self.checks = runner, checks
        self.verdicts: dict[str, Verdict] = {}

    def on_verdict(self, peer: int, work: Tokenize, verdict: Verdict) -> None:
        assert peer == 7 and work.request_id not in self.verdicts
        self.verdicts[work.request_id] = verdict

    def ask(self, *grammars: Grammar) -> list[Verdict]:
        return self.runner.run(self.ask_all(grammars))

    async def ask_all(self, grammars: tuple[Grammar, ...]) -> list[Verdict]:
        self.verdicts.clear()
        for index, grammar in enumerate(grammars):
            self.checks.submit(7, Tokenize(str(index), "m", text="x", grammar=grammar))
        await self.wait(len(grammars))
        return [self.verdicts[str(index)] for index in range(len(grammars))]

    async def wait(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(self.verdicts) < number:
            assert time.monotonic() < deadline, f"{len(self.verdicts)} of {number} verdicts"
            await asyncio.sleep(0.005)

    async def start(self) -> None:
        self.checks.start()

    async def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def tokenizer_folder(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def checks(tokenizer_folder: Path) -> GrammarChecks:
    return GrammarChecks(text_config(tokenizer_folder), LIMITS)


@pytest.fixture(scope="module")
def rig(tokenizer_folder: Path) -> Iterator[CheckRig]:
    with serving(GrammarChecks(text_config(tokenizer_folder), LIMITS)) as made:
        yield made


@contextlib.contextmanager
def serving(checks: GrammarChecks) -> Iterator[CheckRig]:
    with asyncio.Runner() as runner:
        checks.set_model(410, EOS)
        made = CheckRig(runner, checks)
        task = runner.get_loop().create_task(checks.run(made.on_verdict))
        yield made
        task.cancel()
        runner.run(_ended(task))


async def _ended(task: "asyncio.Task[None]") -> None:
    await asyncio.wait([task])


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


GOOD = regex("[a-z]+")
HOSTILE: dict[str, tuple[Grammar, str]] = {
    "no schema": (schema(""), "not valid JSON"),
    "a text": (schema('""'), "an object or a boolean"),
    "a keyword": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "nowhere": (schema({"$ref": "#/$defs/x"}), "does not define"),
    "circle": (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no first token"),
    "deep": (schema('{"items":' * 20_000 + "{}" + "}" * 20_000), ""),
    "alternatives": (Grammar(GrammarKind.CHOICE, json.dumps([f"x{i}" for i in range(100_000)])), "bytes; at most"),
    "many rules": (
        Grammar(GrammarKind.EBNF, "root ::= " + " | ".join(f'"{i:x}"' for i in range(27_000))),
        "CPU time",
    ),
    "left recursion": (Grammar(GrammarKind.EBNF, 'root ::= root "a"'), "no first token"),
    "empty language": (regex(r"[^\s\S]"), "no first token"),
    "outlines": (
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}', GrammarEngine.OUTLINES),
        "",
    ),
    "states of outlines": (Grammar(GrammarKind.REGEX, r"(\w|-){900}", GrammarEngine.OUTLINES), "CPU time"),
    "10 MB": (regex("a" * 10_000_000), "10000000 bytes; at most"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_cannot_be_had_is_rejected_in_time(rig: CheckRig, name: str) -> None:
    grammar, cause = HOSTILE[name]
    verdict, after = rig.ask(grammar, GOOD)
    assert isinstance(verdict, TextRejected), name
    assert verdict.field == "grammar" and cause in verdict.message and verdict.message
    assert after == Grammar(GrammarKind.REGEX, "[a-z]+", GrammarEngine.GUIDANCE)


@pytest.mark.parametrize("engine", OTHER_ENGINES)
@pytest.mark.parametrize("escaped", [r"^a\/b\-c$", r"^a\/b$", r"\-\/\_"])
def test_escapes_of_signs_end_in_a_verdict(rig: CheckRig, engine: GrammarEngine, escaped: str) -> None:
    """A pattern as JavaScript writes it, alone and in a schema."""
    in_schema = schema({"type": "object", "properties": {"a": {"type": "string", "pattern": escaped}}})
    asked = [msgspec.structs.replace(one, engine=engine) for one in (regex(escaped), in_schema)]
    assert len(rig.ask(*asked, GOOD)) == 3


def test_what_one_engine_refuses_is_a_client_error_if_the_next_one_does_not_start(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(JobWorkers):
        def __init__(self, module: str, settings: ServerSettings) -> None:
            super().__init__(module, settings)
            self.engine = settings.engine

        async def load(self) -> list[str]:
            if self.engine is GrammarEngine.XGRAMMAR:
                raise BlockyardError("it does not start")
            return await super().load()

    monkeypatch.setattr(grammar_checks, "JobWorkers", Failing)
    wrong, beyond = Grammar(GrammarKind.EBNF, "root ::= missing"), schema(BEYOND_GUIDANCE)
    with serving(checks) as rig:
        for verdict in rig.ask(wrong, beyond):
            assert isinstance(verdict, TextRejected)
            assert verdict.code == "" and "it does not start" not in verdict.message


def test_a_check_gives_way_to_open_streams(rig: CheckRig) -> None:
    rig.ask(regex("y{2}"))
    worker, own = rig.checks.worker_pids[0], os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, worker) == min(own + LOW_PRIORITY, 19)
    group = Path(f"/proc/{worker}/autogroup")
    assert not group.exists() or group.read_text().split()[1:] in ([], ["nice", str(LOW_PRIORITY)])


def test_a_verdict_is_kept(rig: CheckRig) -> None:
    grammar, _ = HOSTILE["many rules"]
    first, second = rig.ask(grammar, grammar)  # the second waits for the first's verdict
    assert isinstance(first, TextRejected) and isinstance(second, TextRejected)
    began = time.process_time()
    again, good = rig.ask(grammar, GOOD)
    assert isinstance(again, TextRejected) and again.message == first.message
    assert isinstance(good, Grammar) and time.process_time() - began < 1.0


def test_the_workers_of_an_engine_start_with_its_first_grammar_and_hold_up_no_other(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xgrammar takes seconds of CPU time to import, and hundreds of MiB."""
    monkeypatch.setattr(grammar_checks, "FALLBACK_S", LIMIT_S)
    with serving(checks) as rig:
        assert rig.ask(regex("v{3}")) == [msgspec.structs.replace(regex("v{3}"), engine=GrammarEngine.GUIDANCE)]
        assert len(checks.worker_pids) == NUM_WORKERS
        others = [Grammar(GrammarKind.REGEX, "v{4}", engine) for engine in OTHER_ENGINES]
        asked = rig.ask(*others, *(regex(f"v{{{n}}}") for n in range(5, 15)))
        assert asked[: len(others)] == others
        assert not {"0", "2"} & set(list(rig.verdicts)[:10])  # those that load torch
        rig.runner.run(rig.until(lambda: len(checks.worker_pids) == NUM_WORKERS * (1 + len(others))))
        again = [Grammar(GrammarKind.REGEX, "v{5}", engine) for engine in OTHER_ENGINES]
        began = time.monotonic()
        assert rig.ask(*again) == again and time.monotonic() - began < 2.0


def test_an_engine_that_may_be_asked_next_is_imported_before_a_grammar_needs_it(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "FALLBACK_S", 0.1)
    with serving(checks) as rig:
        rig.runner.run(rig.start())
        rig.runner.run(rig.until(lambda: len(checks.worker_pids) == 2 * NUM_WORKERS))
        usual, fallback = (parent_of(pid) for pid in checks.worker_pids[::NUM_WORKERS])
        priority = partial(os.getpriority, os.PRIO_PROCESS)
        assert priority(usual) < priority(fallback)  # streams come first
        grammar = Grammar(GrammarKind.REGEX, "v{4}", GrammarEngine.XGRAMMAR)
        assert rig.ask(grammar, regex("v{5}"), schema(BEYOND_GUIDANCE))[0] == grammar
        assert len(checks.worker_pids) == 2 * NUM_WORKERS


def test_the_engine_of_the_settings_is_there_before_a_grammar_needs_it(tokenizer_folder: Path) -> None:
    checks = GrammarChecks(text_config(tokenizer_folder, grammar_engine=GrammarEngine.OUTLINES), LIMITS)
    with serving(checks) as rig:
        rig.runner.run(rig.start())
        rig.runner.run(rig.until(lambda: len(checks.worker_pids) == NUM_WORKERS))
        grammar = Grammar(GrammarKind.REGEX, "v{4}", GrammarEngine.OUTLINES)
        assert rig.ask(grammar) == [grammar] and len(checks.worker_pids) == NUM_WORKERS


def test_a_grammar_that_one_engine_refuses_is_given_to_the_next(rig: CheckRig) -> None:
    taken, refused = rig.ask(schema(BEYOND_GUIDANCE), schema({"type": "array", "uniqueItems": True}))
    assert isinstance(taken, Grammar) and taken.engine == GrammarEngine.XGRAMMAR
    assert isinstance(refused, TextRejected) and not refused.code and "guidance does not support" in refused.message


def test_an_engine_of_one_grammar_is_not_that_of_another(rig: CheckRig) -> None:
    wanted = Grammar(GrammarKind.EBNF, 'root ::= "a"', GrammarEngine.XGRAMMAR)
    other = regex("b+")
    assert rig.ask(wanted, other) == [wanted, Grammar(GrammarKind.REGEX, "b+", GrammarEngine.GUIDANCE)]
    tag = json.dumps({"structures": [], "triggers": ["<f>"]})
    (verdict,) = rig.ask(Grammar(GrammarKind.STRUCTURAL_TAG, tag))
    assert isinstance(verdict, TextRejected)


def test_the_loop_goes_on_during_a_burst(rig: CheckRig) -> None:
    """200 bad grammars at once, five of which use up their CPU time."""
    bad = [regex(f"(a{i}") for i in range(195)]
    slow = ["root ::= " + " | ".join(f'"{n}{i:x}"' for i in range(20_000)) for n in range(5)]
    bad.extend(Grammar(GrammarKind.EBNF, source) for source in slow)
    late: list[float] = []

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - began)

    async def burst() -> list[Verdict]:
        beats = asyncio.create_task(beat())
        try:
            return await rig.ask_all(tuple(bad))
        finally:
            beats.cancel()

    verdicts = rig.runner.run(burst())
    assert all(isinstance(verdict, TextRejected) for verdict in verdicts)
    late.sort()
    assert late[len(late) * 99 // 100] < 0.3  # of a loop on a busy machine; a check takes longer


def test_too_many_different_grammars_are_turned_away(rig: CheckRig) -> None:
    verdicts = rig.ask(*[regex(f"c{i}") for i in range(MAX_WAITING + 40)])
    busy = [verdict for verdict in verdicts if isinstance(verdict, TextRejected)]
    assert len(busy) == 40 and {verdict.code for verdict in busy} == {BUSY}


def test_another_model_makes_new_verdicts(rig: CheckRig) -> None:
    assert isinstance(rig.ask(regex("é"))[0], Grammar)
    rig.checks.set_model(40, EOS)
    verdict = rig.ask(regex("é"))[0]
    assert isinstance(verdict, TextRejected) and "no first token" in verdict.message
    rig.checks.set_model(410, EOS)
    assert isinstance(rig.ask(regex("é"))[0], Grammar)


def test_the_end_of_the_fork_server_costs_no_verdict(rig: CheckRig) -> None:
    rig.ask(regex("z{3}"))
    before = rig.checks.worker_pids

    async def ask_and_kill() -> list[Verdict]:
        asking = asyncio.create_task(rig.ask_all(tuple(regex(f"z{{{n}}}") for n in range(4, 44))))
        await asyncio.sleep(0)
        for server in {parent_of(pid) for pid in before}:
            os.kill(server, signal.SIGKILL)
        return await asking

    assert all(isinstance(verdict, Grammar) for verdict in rig.runner.run(ask_and_kill()))
    assert not set(before) & set(rig.checks.worker_pids)


COSTLY = [
    Grammar(GrammarKind.EBNF, "root ::= " + " | ".join(f'"{n}{i:x}"' for i in range(20_000))) for n in range(12)
]  # each takes more than all of its time


def test_costly_grammars_of_one_tenant_hold_up_no_small_ones(rig: CheckRig) -> None:
    rig.ask(regex("w{3}"))

    async def run() -> None:
        rig.verdicts.clear()
        for index, grammar in enumerate(COSTLY):
            rig.checks.submit(7, Tokenize(f"costly {index}", "m", text="x", grammar=grammar, tenant="key-1"))
        await asyncio.sleep(0.1)
        small = [regex(f"w{{{n}}}") for n in range(4, 14)]
        for index, grammar in enumerate(small):
            rig.checks.submit(7, Tokenize(f"{index}", "m", text="x", grammar=grammar, tenant="key-2", quick=True))
        await rig.wait(len(COSTLY) + len(small))

    rig.runner.run(run())
    order = list(rig.verdicts)
    smalls = [i for i, name in enumerate(order) if "costly" not in name]
    assert len(smalls) == 10 and max(smalls) < 12  # no more than two costly ones before them


def test_a_quick_check_that_takes_long_is_sent_back_and_is_no_verdict(rig: CheckRig) -> None:
    grammar, _ = HOSTILE["many rules"]
    other = Grammar(GrammarKind.EBNF, grammar.source + ' | "other"')

    async def run(quick: bool) -> TextRejected:
        rig.verdicts.clear()
        rig.checks.submit(7, Tokenize("0", "m", text="x", grammar=other, quick=quick))
        await rig.wait(1)
        verdict = rig.verdicts["0"]
        assert isinstance(verdict, TextRejected)
        return verdict

    assert [rig.runner.run(run(quick)).code for quick in (True, True, False)] == [TAKES_LONG, TAKES_LONG, ""]
    assert not rig.runner.run(run(True)).code  # now its verdict is known
