"""A fork server whose service has ended."""

import socket

from blockyard.services.tokenizer_pool.workers.fork_server import ForkServer, Workload
from blockyard.services.tokenizer_pool.workers.worker_frames import pair
from blockyard.shared.errors import LoadError


def test_a_service_that_has_ended_is_told_nothing() -> None:
    """A launcher that has heard of a wrong model from another service ends this one first."""
    ours, theirs = pair(socket.SOCK_SEQPACKET)

    def load() -> Workload:
        theirs.close()
        raise LoadError("no tokenizer")

    with ours:
        ForkServer(ours, "text", load).run()
