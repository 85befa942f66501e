"""Types of the worker's numpy arrays. Imports no torch."""

from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer[Any]]  # Ints or Words
Words = npt.NDArray[np.int32]  # words of the slot state on the device
