"""Asks the ring for vectors, scores and classes of texts."""

from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PoolingCall


class PoolingClient:
    """The part of a `RingClient` for pooling models."""

    async def pool(self, call: PoolingCall) -> PooledAnswer:
        """Returns the results of all inputs, in order. Cancelling it drops the request in the ring.

        Raises RequestError, with the name of the input that is wrong: `input[17]`.
        """
        raise NotImplementedError
