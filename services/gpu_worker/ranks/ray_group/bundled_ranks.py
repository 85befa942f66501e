"""The placement group of a worker's ranks, and the actors in it. Imports Ray."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from blockyard.services.gpu_worker.parallel.meeting import LOOPBACK
from blockyard.services.gpu_worker.ranks import network
from blockyard.services.gpu_worker.ranks.group_digest import make_digest
from blockyard.services.gpu_worker.ranks.joining import RankTicket
from blockyard.services.gpu_worker.ranks.rank_process import join_leader
from blockyard.services.gpu_worker.ranks.ray_group.frames import PlaceRanks, RanksFailed
from blockyard.services.gpu_worker.ranks.ray_group.node_choice import Node, as_table, choose_nodes, in_words
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import shortened

LEADER = 0
NODE_ID = "ray.io/node-id"  # label that Ray gives to each node
FREED_S = 5.0  # within it Ray has taken back what ranks had that ended before
POLL_S = 0.2
MOST_CHARS = 600  # of an error of Ray's
NSIGHT = {"t": "cuda,cudnn,cublas", "o": "'rank_%p'", "cuda-graph-trace": "node"}  # options of nsys


class RankActor:
    """Ray makes one in a process of its own, which becomes the rank's."""

    def gpus(self) -> list[str]:
        """Returns CUDA's names of the GPUs that Ray has given to this process."""
        return [str(one) for one in ray.get_gpu_ids()]

    def follow(self, ticket: bytes) -> None:
        """Does what the leader says, until it closes its end. ticket: in msgpack."""
        own = msgspec.msgpack.decode(ticket, type=RankTicket)
        if own.interface != LOOPBACK:  # the leader is on another machine
            for folder in (Path(own.folder).parent, Path(own.folder)):
                folder.mkdir(mode=0o700, exist_ok=True)
            if own.config.device != "cpu":
                os.environ.update(network.environment(BusConfig(registry="", bind=f"tcp://{own.interface}")))
        join_leader(msgspec.structs.replace(own, starter_pid=os.getppid(), digest=make_digest(own.config)), None)


class BundledRanks:
    """The placement group of a worker's ranks, with a bundle for each."""

    def __init__(self, asked: PlaceRanks) -> None:
        self._asked, self._own = asked, ray.get_runtime_context().get_node_id()
        self._unit, self._each = ("CPU", asked.cpus) if asked.cpus else ("GPU", 1)
        self._num_ranks = asked.group_size * asked.num_groups
        self._group: PlacementGroup | None = None
        self._ends: dict[Any, int] = {}  # rank by the reference to what its process returns

    def place(self, timeout_s: float) -> bool:
        """Returns False if there is no room in time."""
        until = time.monotonic() + timeout_s
        self._group = self._place_on_chosen(min(time.monotonic() + FREED_S, until))
        if self._group is None:  # a cluster may start nodes by need: Ray chooses once they are there
            anywhere = [self._own, *[""] * (self._num_ranks - 1)]
            self._group = self._place_on(anywhere, max(until - time.monotonic(), POLL_S))
        return self._group is not None

    def _place_on_chosen(self, until: float) -> PlacementGroup | None:
        while True:
            chosen = choose_nodes(self.nodes(), self._own, self._asked.group_size, self._asked.num_groups)
            left_s = until - time.monotonic()
            if chosen is not None and (group := self._place_on(chosen, max(left_s, POLL_S))) is not None:
                return group
            if left_s <= 0:
                return None
            time.sleep(POLL_S)

    def _place_on(self, nodes: Sequence[str], timeout_s: float) -> PlacementGroup | None:
        """nodes: by rank; empty: any."""
        group = placement_group(
            [{self._unit: self._each}] * self._num_ranks,
            "STRICT_PACK" if set(nodes) == {self._own} else "PACK",
            bundle_label_selector=[{NODE_ID: node} if node else {} for node in nodes],
        )
        if group.wait(timeout_s):
            return group
        remove_placement_group(group)
        return None

    def nodes(self) -> list[Node]:
        free = available_resources_per_node()
        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(free.get(node["NodeID"], {}).get(self._unit, 0) / self._each),
                int(node["Resources"].get(self._unit, 0) / self._each),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def no_room(self) -> RanksFailed:
        """Returns what is needed, and what is free on each node."""
        unit = f"{self._unit}s" if self._each == 1 else f"times {self._each} {self._unit}s"
        found = self.nodes(), self._own, self._num_ranks, unit
        return RanksFailed(in_words(*found), as_table(*found), None)

    def addresses(self) -> list[str]:
        """Returns the address of each rank's node."""
        by_id = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        chosen = placement_group_table(self._group)["bundles_to_node_id"]
        return [by_id[chosen[rank]] for rank in range(self._num_ranks)]

    def leader_gpu(self) -> str:
        """Returns CUDA's name of the GPU in the leader's bundle, or nothing if ranks have none."""
        if self._unit == "CPU":
            return ""
        actor = self._make_actor(LEADER, {"env_vars": self._asked.environment})
        [found] = ray.get(actor.gpus.remote())
        ray.kill(actor)
        return str(found)

    def start(self, tickets: Sequence[bytes]) -> None:
        """Starts the ranks that follow the leader. Raises RayError if one cannot be started."""
        runtime: dict[str, Any] = {"env_vars": self._asked.environment}
        if self._asked.with_nsight:
            runtime["nsight"] = NSIGHT
        actors = [self._make_actor(rank, runtime) for rank in range(LEADER + 1, self._num_ranks)]
        ray.get([actor.gpus.remote() for actor in actors])
        for rank, (actor, ticket) in enumerate(zip(actors, tickets, strict=True), LEADER + 1):
            self._ends[actor.follow.remote(ticket)] = rank

    def _make_actor(self, rank: int, runtime: dict[str, Any]) -> Any:
        needs = {"num_cpus": self._each} if self._unit == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return ray.remote(RankActor).options(**needs, scheduling_strategy=where, runtime_env=runtime).remote()

    def wait_failure(self) -> RanksFailed | None:
        """Waits until a rank fails or all have ended as their leader said. Returns which has failed, and why."""
        running = list(self._ends)
        while running:
            [ended], running = ray.wait(running)
            try:
                ray.get(ended)
            except RayActorError:
                return RanksFailed("its process or its node is gone", [], self._ends[ended])
            except RayError as e:
                return RanksFailed(in_a_line(e), [], self._ends[ended])
        return None


def in_a_line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()), MOST_CHARS)
