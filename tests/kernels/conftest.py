"""Without a GPU the Triton kernels of this folder run in Triton's interpreter; set before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.use()
