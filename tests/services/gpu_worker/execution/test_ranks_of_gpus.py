"""What followers with GPUs are told beside forward passes: kernels, graphs that are given up; and sends of prefills."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from rank_logits import CPU
from reference_ops import ReferenceOps, run_ahead
from slot_plans import collected, greedy, plan, prompt_of, started
from tiny_models import BY_NAME, start
from two_ranks import CAPACITY, TwoRanks

from blockyard.services.gpu_worker.execution.cuda import cuda_steps
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import (
    CapturedGraphs,
    DecodeSize,
    DecodeSteps,
    ForwardOutput,
    MirroredReplay,
)
from blockyard.services.gpu_worker.execution.cuda.follower_steps import DeviceFollowerSteps, FollowerGraph
from blockyard.services.gpu_worker.execution.cuda.prefill_graphs import PrefillGraph, end_trial
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import BatchDescriptor, write_trial
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerEvents
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror, LeaderModel
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.parallel.commands import (
    BeginGraph,
    DropGraph,
    Followers,
    InstallKernels,
    ReplayGraph,
)
from blockyard.shared.errors import RankLostError
from blockyard.shared.messages import KVSend, SlotRun, StepPlan
from blockyard.shared.messages.base import Frame


class Mark:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def replay(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[TwoRanks]:
    folder, group = tmp_path / "model", tmp_path / "group"
    group.mkdir()
    BY_NAME["llama"].save(folder)
    found = TwoRanks(folder, group, start(folder, max_num_seqs=CAPACITY).geometry, 2, 1)
    yield found
    found.close()


def test_a_prefill_that_sends_blocks_records_layers_and_is_computed_by_all(
    ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_steps, "LayerEvents", partial(LayerEvents, make_event=Mark))
    runner, prompt = ranks.runner, prompt_of(5)
    tokens = []
    for sends in ([], [KVSend(1, 2, 1, b"", [6], [0], is_last=True)]):
        runner.reset(4)
        starts = [started(0, prompt, greedy(), [6, 7])]
        stored = runner.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, len(prompt))], sends=sends))
        assert [one.layers.stop for one in stored][-1:] == [runner.pool.shape.num_layers] * bool(sends)
        tokens.append(collected(runner)[1][0].token_ids)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 1
    ranks.close()
    assert [one.records_layers for one in ranks.forwards] == [False, True]
    before, layers = ranks.stored
    assert not before
    assert [group.layers for group in layers] == [group.layers for group in stored]
    assert all(group.is_stored() for group in layers)


def test_followers_measure_scales_in_the_steps_in_which_the_leader_does(ranks: TwoRanks) -> None:
    """Not in trial steps, nor in those without a prompt of several tokens."""
    runner, starts = ranks.runner, [started(0, prompt_of(5), greedy(), [6, 7])]
    for number, is_trial in enumerate((True, False, False)):
        runner.reset(4)
        runner.pool.scales_pending = number < 2
        with runner.pool.trial_steps() if is_trial else nullcontext():
            runner.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 5)]))
            assert collected(runner)[1][0].token_ids
    runner.pool.scales_pending = True
    runner.launch(plan(2, 0))
    assert collected(runner)[2][0].token_ids
    assert [one.measures_scales for one in ranks.forwards] == [False, True, False, False]


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
def test_prompts_alone_do_not_wait_for_the_leaders_device(size: int, num_stages: int, tmp_path: Path) -> None:
    folder, group, prompt = tmp_path / "model", tmp_path / "group", prompt_of(20)
    group.mkdir()
    BY_NAME["llama"].save(folder)
    alone = start(folder, max_num_seqs=CAPACITY)
    run_ahead(alone, CAPACITY, masks=False)
    ranks = TwoRanks(folder, group, alone.geometry, size, num_stages)
    found = []
    for runner in (alone, ranks.runner):
        runner.reset(4)
        starts = [started(0, prompt, greedy(), [3, 4, 5, 6, 7, 8])]
        runner.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 9)]))
        runner.launch(StepPlan(1, 2, [], [], [], [SlotRun(0, 11)]))
        runner.launch(plan(3, 0))
        results = collected(runner)
        found.append(results[2][0].token_ids + results[3][0].token_ids)
    ranks.close()
    assert found[0] == found[1] and len(found[0]) == 2
    assert [one.num_gathered for one in ranks.forwards] == [0, 0, 1]
    assert [one.num_logits for one in ranks.forwards][:2] == [0, 1]


def test_graphs_that_are_captured_again_are_dropped_by_all(ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Frame] = []

    def send(frame: Frame, to: Followers = Followers.ALL) -> None:
        sent.append(frame)

    runner = ranks.runner
    assert isinstance(runner.model, LeaderModel)
    mirror = DeviceMirror(send, runner.model.ranks, SameMemory())
    assert isinstance(runner.loop.steps, cuda_steps.CudaSteps)
    steps: DecodeSteps = runner.loop.steps.decodes
    output = ForwardOutput(torch.empty(0), torch.empty(0))
    for rows in (1, 2):
        with mirror.capturing() as key:
            graphs = CapturedGraphs(MirroredReplay(Mark(), key, mirror), output, [])
            steps._graphs[DecodeSize(rows, short_context=False)] = graphs
    steps.capture_again(2)
    assert [frame.key for frame in sent if isinstance(frame, BeginGraph)] == [1, 2]
    assert sent[-1] == DropGraph(2) and [size.rows for size in steps._graphs] == [1]
    steps._graphs.clear()


@pytest.mark.parametrize("keeps_hidden", [False, True])
def test_each_replay_of_a_prefill_tells_followers_its_words(ranks: TwoRanks, *, keeps_hidden: bool) -> None:
    """Also that of a trial: without words they would compute what their memory had before."""
    sent: list[Frame] = []
    size = BatchDescriptor(4, 9, 3, 5, keeps_hidden=keeps_hidden)
    words = torch.empty(sum(size.parts), dtype=torch.int64)
    write_trial(words, size, 100)
    assert isinstance(ranks.runner.model, LeaderModel)
    mirror = DeviceMirror(lambda frame, to=Followers.ALL: sent.append(frame), ranks.runner.model.ranks, SameMemory())
    graph = PrefillGraph(size, words, MirroredReplay(Mark(), 1, mirror), (Mark(), Mark()))
    graph.replay(words, needs_processing=False)
    (replayed,) = sent
    assert isinstance(replayed, ReplayGraph)
    tokens = np.frombuffer(replayed.words, np.int32)
    assert len(tokens) == 3 * 9 + (3 + 1) + (0 if keeps_hidden else 2 * 5)
    assert tokens[:9].tolist() == list(range(4, 13))


def test_a_trial_that_does_not_end_is_a_lost_rank() -> None:
    end_trial(Mark())

    class Hanging(Mark):
        def query(self) -> bool:
            return False

    with pytest.raises(RankLostError, match=r"not ended within 0\.05 s"):
        end_trial(Hanging(), most_s=0.05)


def test_a_follower_refuses_a_replay_without_the_words_of_its_graph(ranks: TwoRanks) -> None:
    assert isinstance(ranks.runner.model, LeaderModel)
    model, pool, groups = ranks.runner.model, ranks.runner.pool, ranks.runner.model.ranks
    steps = DeviceFollowerSteps(model, pool, groups, ranks.runner.geometry, ReferenceOps())
    steps._graphs[1] = FollowerGraph(cast(torch.cuda.CUDAGraph, Mark()), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(AssertionError, match="words of another step"):
        steps.do(ReplayGraph(1, b""))


def test_a_graph_of_a_follower_tells_which_layers_its_last_replay_has_stored(ranks: TwoRanks) -> None:
    assert isinstance(ranks.runner.model, LeaderModel)
    model, pool, groups = ranks.runner.model, ranks.runner.pool, ranks.runner.model.ranks
    steps = DeviceFollowerSteps(model, pool, groups, ranks.runner.geometry, ReferenceOps())
    attend = steps._layer_words.around(lambda *_: torch.empty(0))  # type: ignore[arg-type]
    num_layers = pool.shape.num_layers

    class Recording(Mark):
        due: tuple[int, ...] = ()  # layers

        def replay(self) -> None:
            for layer in self.due:
                attend(layer, torch.empty(0))

    graph, words = Recording(), torch.zeros(3, dtype=torch.int32)
    steps._graphs[1] = FollowerGraph(cast(torch.cuda.CUDAGraph, graph), words, records_layers=True)
    steps._graphs[2] = FollowerGraph(cast(torch.cuda.CUDAGraph, Mark()), words)
    steps.do(ReplayGraph(2, bytes(12)))
    assert not steps.stored
    for due in (tuple(range(num_layers)), (0,)):  # the device is amid the second one
        graph.due = due
        steps.do(ReplayGraph(1, bytes(12)))
        assert [group.is_stored() for group in steps.stored] == [layer in due for layer in range(num_layers)]
    steps.do(ReplayGraph(2, bytes(12)))
    assert len(steps.stored) == num_layers, "decodes between a prefill and its sends change nothing"
    steps.forget()
    assert not steps.stored


def test_a_follower_installs_the_kernels_of_its_leader(ranks: TwoRanks) -> None:
    told: list[bytes] = []
    runner = ranks.runner
    assert isinstance(runner.model, LeaderModel)
    groups = runner.model.ranks
    steps = DeviceFollowerSteps(runner.model, runner.pool, groups, runner.geometry, ReferenceOps(), told.append)
    steps.do(InstallKernels(b"[]"))
    assert told == [b"[]"] and runner.pool.device == CPU
