"""Types of the worker's numpy arrays. Imports no torch."""

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]  # words of the slot state on the device
