"""`kv_transfer_params` of a request, for a proxy that sends a prompt and its continuation as two requests.

The keys are as in vLLM's NixlConnector. A proxy sends `do_remote_decode` with `max_tokens` 1: the prompt is computed
in a prefill group and stays in its prefix cache. The answer has parameters for the second request, with
`do_remote_prefill`: it is handed over from the group that they name. Other keys (host, port, block ids) mean nothing,
because the groups of a scheduler know each other.
"""

from typing import Self

import msgspec

FIELD = "kv_transfer_params"


class TransferParams(msgspec.Struct, frozen=True):
    """What a client asks of the transfer of a request's KV blocks."""

    do_remote_decode: bool | None = False  # compute the prompt in a prefill group, and start no handover
    do_remote_prefill: bool | None = False  # begin with the blocks of the group `remote_engine_id`
    remote_engine_id: str | None = None  # incarnation of a worker, in hex

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Reads a JSON object. Raises ValueError for any other text or type."""
        params = msgspec.json.decode(data, type=cls)
        if params.do_remote_decode and params.do_remote_prefill:
            raise ValueError("do_remote_decode and do_remote_prefill are of two requests")
        return params

    @property
    def source(self) -> int | None:
        """The worker that has the prompt's blocks, or had; None if none is named."""
        if not self.do_remote_prefill or self.remote_engine_id is None:
            return None
        try:
            return int(self.remote_engine_id, 16)
        except ValueError:
            return None  # of another engine

    def answer(self, worker: int, request_id: str) -> bytes:
        """The parameters of the second request, as a JSON object; empty if there is to be none.

        worker: the one that has computed the prompt.
        """
        if not self.do_remote_decode:
            return b""
        return msgspec.json.encode(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"{worker:016x}",
                "remote_request_id": request_id,
            }
        )
