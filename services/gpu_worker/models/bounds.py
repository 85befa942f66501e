"""Ranges of the numbers in config.json: far beyond any model there is, near enough to stop what no machine can hold."""

from typing import Annotated

import msgspec

Vocabulary = Annotated[int, msgspec.Meta(ge=1, le=2**23)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # of the hidden state, the MLP, an embedding
Layers = Annotated[int, msgspec.Meta(ge=1, le=2048)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=8192)]
HeadSize = Annotated[int, msgspec.Meta(ge=2, le=8192, multiple_of=2)]  # rotations turn pairs
Positions = Annotated[int, msgspec.Meta(ge=1, le=2**30)]
Window = Annotated[int, msgspec.Meta(ge=0, le=2**30)]  # 0: none
Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
Base = Annotated[float, msgspec.Meta(gt=1, le=1e30)]  # of rotation angles
Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
