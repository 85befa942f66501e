"""What the worker's benchmark of sums over ranks tells `blockyard bench parallel`: frames as JSON, one a line."""

from blockyard.shared.messages.base import Frame


class DeviceRates(Frame, frozen=True):
    """What a rank computes on. The first line."""

    name: str
    read_bytes_per_s: float  # from the device's memory


class SumTime(Frame, frozen=True):
    """Seconds of one sum over all ranks, in a chain of them; on GPUs in a CUDA graph."""

    transport: str  # what moves the parts
    num_bytes: int  # of a part
    sum_s: float
    with_norm_s: float  # of a sum that is added to the residual, and its norm


RankBenchLine = DeviceRates | SumTime
