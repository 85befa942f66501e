"""One script in two processes: process 0 runs the ring, all get all outputs; what differs is an error and no hang."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockyard import LLM, SamplingParams
from blockyard.services.offline.external_launcher.environment import read_place, with_ranks
from blockyard.shared.config.parsed_flags import Values, from_command_line
from blockyard.shared.errors import ConfigError

SRC = Path(__file__).parents[4] / ".src"
SCRIPT = """
    import json, os, sys
    from blockyard import LLM, LoRARequest, SamplingParams
    rank = int(os.environ["RANK"])
    settings = {"worker_cls": "mock", "log_level": "warning", "seed": 0, "enable_lora": True}
    llm = LLM("demo", distributed_executor_backend="external_launcher", **settings)
    params, sql, other = SamplingParams(max_tokens=4, temperature=1.0), LoRARequest("sql", 1, "/sql"), f"/other/{rank}"
    said = []
    calls = [(["a", "b", "c"], None), ([f"only {rank}"], None), (["d"], None), (["e", "f"], [sql, None])]
    for prompts, adapter in [*calls, (["g"], LoRARequest("other", 2, other)), (["h"], LoRARequest("unknown"))]:
        try:
            found = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
            said.append([[one.prompt, one.outputs[0].text] for one in found])
        except ValueError as e:
            said.append(str(e))
    try:
        llm.reset_prefix_cache()
        said.append("reset")
    except ValueError as e:
        said.append(str(e))
    open(os.path.join(sys.argv[1], f"said{rank}"), "w").write(json.dumps(said))
    llm.close()
"""
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="processes-") as folder:
        yield Path(folder)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SRC), "TMPDIR": str(folder)} | more


def test_all_processes_of_torchrun_get_all_outputs(short_path: Path) -> None:
    script = short_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT), "utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(short_path)]
    subprocess.run([sys.executable, *command], env=environment(short_path), check=True, timeout=120)
    first, second = (json.loads((short_path / f"said{rank}").read_text("utf-8")) for rank in range(2))
    assert first[:6] == second[:6] and [one[0] for one in first[0]] == ["a", "b", "c"]
    assert first[1] == first[4] == "the prompts or parameters of generate differ: processes [1] from process 0"
    assert [one[0] for one in first[3]] == ["e", "f"]
    assert first[5] == "the adapter 'unknown' is not loaded, and lora_path is empty"
    assert first[6] == "reset" and "process 0 of the script has the ring" in second[6]
    with LLM("demo", worker_cls="mock", log_level="warning", seed=0) as llm:
        alone = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=4, temperature=1.0), use_tqdm=False)
    assert [[one.prompt, one.outputs[0].text] for one in alone] == first[0]


def test_a_process_that_ends_is_an_error_of_the_others(short_path: Path) -> None:
    """Process 1 ends in place of its call, and process 0 before it answers."""
    make = """
        import os, sys
        from blockyard import LLM
        llm = LLM("demo", worker_cls="mock", log_level="error", distributed_executor_backend="external_launcher")
        if os.environ["RANK"] == sys.argv[1]:
            os._exit(0)
        try:
            llm.generate("a", use_tqdm=False)
        except RuntimeError as e:
            print(e)
        llm.close()
    """
    for dies, said in (("1", "process 1 has ended"), ("0", "process 0 has ended")):
        both = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(make), dies],
                env=environment(short_path, **ENVIRONMENT | {"RANK": str(rank), "MASTER_PORT": dies}),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [one.communicate(timeout=60)[0] for one in both]
        assert said in told[1 - int(dies)]


def test_the_environment_is_torchrun_s(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    place = read_place(ENVIRONMENT)
    assert (place.rank, place.size) == (0, 2) and place.folder == read_place(ENVIRONMENT | {"RANK": "1"}).folder
    assert place.folder != read_place(ENVIRONMENT | {"MASTER_PORT": "2"}).folder
    with pytest.raises(ConfigError, match="RANK is not set: start the script by torchrun"):
        read_place({})
    with pytest.raises(ConfigError, match="of 2 processes 1 are on this host"):
        read_place(ENVIRONMENT | {"LOCAL_WORLD_SIZE": "1"})
    monkeypatch.setattr("tempfile.tempdir", str(short_path / ("x" * 80)))
    with pytest.raises(ConfigError, match="longer than 90 bytes; set TMPDIR"):
        read_place(ENVIRONMENT)
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    place.folder.chmod(0o755)
    with pytest.raises(ConfigError, match="not a folder that this user alone may enter"):
        read_place(ENVIRONMENT)


def test_there_are_as_many_ranks_as_processes() -> None:
    def values(*flags: str) -> Values:
        return Values(from_command_line(list(flags))[0])

    assert with_ranks(values(), 2)["tensor-parallel-size"] == 2
    assert with_ranks(values("-dp", "2"), 4)["tensor-parallel-size"] == 2
    assert with_ranks(values("-tp", "2"), 2)["distributed-executor-backend"] == "mp"
    with pytest.raises(ConfigError, match="4 processes for 2 ranks; start as many"):
        with_ranks(values("-tp", "2"), 4)


def test_other_arguments_are_an_error_in_all_processes(short_path: Path) -> None:
    make = """
        import os
        from blockyard import LLM
        try:
            LLM("demo", worker_cls="mock", log_level="error", distributed_executor_backend="external_launcher",
                seed=int(os.environ["RANK"]))
        except ValueError as e:
            print(e)
    """
    both = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(make)],
            env=environment(short_path, **ENVIRONMENT | {"RANK": str(rank)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [one.communicate(timeout=60)[0] for one in both]
    assert told == ["the arguments of LLM differ between the processes\n"] * 2
