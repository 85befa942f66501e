"""Steps of replicas that have the experts of a model together: each is computed by all of them at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.execution.device_loop import DeviceSteps, LaunchedStep, StepRequest
from blockyard.services.gpu_worker.execution.device_slots import DeviceSlots
from blockyard.services.gpu_worker.execution.ranks.expert_balancer import ExpertBalancer
from blockyard.services.gpu_worker.parallel.commands import BeginExchange, ServeExperts
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange, StepAgreement, StepOffer
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.services.gpu_worker.slots import StepRows


@runtime_checkable
class PaddedSteps(Protocol):
    """Steps whose decodes are padded to the sizes of CUDA graphs, which are the same in all replicas."""

    def most_rows(self, rows: StepRows) -> int:
        """The most rows that a layer has of such a step."""

    def pad(self, num_rows: int | None) -> None:
        """Decodes have so many rows from here on. None: only their own, and no graph computes them."""

    def launch_padding(self) -> None:
        """Launches a decode of rows of padding alone."""


class ReplicaSteps:
    """Implements `DeviceSteps`: a step of `steps` is launched once all replicas know its size."""

    def __init__(
        self,
        steps: DeviceSteps,
        exchange: ExpertExchange,
        agreement: StepAgreement,
        send: SendCommand | None,
        balancer: ExpertBalancer | None = None,
    ) -> None:
        """send: to followers; None: there are none. balancer: of experts; None: they stay where they are."""
        self._steps, self._exchange, self._agreement, self._send = steps, exchange, agreement, send
        self._balancer = balancer
        self._padded = steps if isinstance(steps, PaddedSteps) else None
        self.runs_ahead = steps.runs_ahead

    @property
    def slots(self) -> DeviceSlots:
        return self._steps.slots

    @property
    def capacity(self) -> int:
        return self._steps.capacity

    @property
    def most_in_flight(self) -> int:
        return self._steps.most_in_flight

    def reset(self) -> None:
        self._steps.reset()

    def order(self, slots: Ints) -> None:
        self._steps.order(slots)

    def idle(self) -> bool:
        return self._steps.idle()

    def launch(self, step: StepRequest) -> LaunchedStep:
        """A step without rows is none of other replicas."""
        if not len(step.rows):
            return self._steps.launch(step)
        num_rows = int(step.rows.counts.sum()) if self._padded is None else self._padded.most_rows(step.rows)
        with self._agreed(num_rows, is_decode=not step.rows.has_prefill):
            return self._steps.launch(step)

    def join(self) -> bool:
        """Serves a step of other replicas, if one waits for this one."""
        if not self._agreement.is_called:
            return False
        with torch.inference_mode(), self._agreed(0, is_decode=True) as is_padded:
            if is_padded and self._padded is not None:
                self._padded.launch_padding()
            else:
                self._tell(ServeExperts())
                self._exchange.serve()
        return True

    @contextmanager
    def _agreed(self, num_rows: int, *, is_decode: bool) -> Iterator[bool]:
        """A step of all replicas. True: it is a decode of as many rows in each. Otherwise only experts pad theirs."""
        offers = self._agreement.agree(StepOffer(num_rows, is_decode and self._padded is not None))
        most = max(one.num_rows for one in offers)
        is_padded = all(one.is_decode for one in offers)
        if self._balancer is not None:
            self._balancer.begin_step()
        if self._padded is not None:
            self._padded.pad(most if is_padded else None)
        if is_padded:
            yield True
            return
        self._exchange.num_rows = most
        self._tell(BeginExchange(most))
        yield False
        self._exchange.num_rows = None
        if self._padded is not None:  # what follows may be padded, or captured
            self._tell(BeginExchange(0))

    def _tell(self, command: BeginExchange | ServeExperts) -> None:
        if self._send is not None:
            self._send(command)
