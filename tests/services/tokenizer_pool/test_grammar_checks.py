"""Grammars of clients are checked in a process that may be killed: real processes, real limits."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_rig import parent_of, text_config
from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool.grammar_checks import MAX_WAITING, GrammarChecks, Verdict
from blockyard.services.tokenizer_pool.job_limits import MIB, JobLimits
from blockyard.shared.messages import BUSY, TAKES_LONG, Grammar, GrammarEngine, GrammarKind, TextRejected, Tokenize
from blockyard.shared.process.settings import LOW_PRIORITY

LIMITS = JobLimits(check_cpu_s=0.15, memory_bytes=512 * MIB, memory_bytes_per_token=0)
LIMIT_S = 100.0
EOS = [1, 3]


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


@pytest.fixture(scope="module")
def rig(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckRig]:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    with asyncio.Runner() as runner:
        checks = GrammarChecks(text_config(folder), LIMITS)
        checks.set_model(410, EOS)
        made = CheckRig(runner, checks)
        serving = runner.get_loop().create_task(checks.run(made.on_verdict))
        yield made
        serving.cancel()
        runner.run(_ended(serving))


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
    "10 MB": (regex("a" * 10_000_000), "10000000 bytes; at most"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_cannot_be_had_is_rejected_in_time(rig: CheckRig, name: str) -> None:
    grammar, cause = HOSTILE[name]
    verdict, after = rig.ask(grammar, GOOD)
    assert isinstance(verdict, TextRejected), name
    assert verdict.field == "grammar" and cause in verdict.message and verdict.message
    assert after == Grammar(GrammarKind.REGEX, "[a-z]+", GrammarEngine.GUIDANCE)


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


def test_engines_are_there_before_a_grammar_needs_them(rig: CheckRig) -> None:
    """xgrammar takes seconds of CPU time to import; all workers share what their server imported."""
    rig.ask(regex("v{3}"))
    before, began = rig.checks.worker_pids, time.monotonic()
    for engine in (GrammarEngine.XGRAMMAR, GrammarEngine.OUTLINES, GrammarEngine.LM_FORMAT_ENFORCER):
        grammar = Grammar(GrammarKind.REGEX, "v{4}", engine)
        assert rig.ask(grammar) == [grammar]
    assert time.monotonic() - began < 1.5 and rig.checks.worker_pids == before


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
    before, server = rig.checks.worker_pids, parent_of(rig.checks.worker_pids[0])

    async def ask_and_kill() -> list[Verdict]:
        asking = asyncio.create_task(rig.ask_all(tuple(regex(f"z{{{n}}}") for n in range(4, 44))))
        await asyncio.sleep(0)
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
