"""Which adapter each row of a step has. One object of a model: its layers read it, the steps write it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import AdapterTiles
from blockyard.services.gpu_worker.layers.long_rotations import LongRotations

NO_PLACE = -1  # of a row without an adapter


class AdapterRows:
    """The places of the adapters of the rows that the next layers compute."""

    def __init__(self) -> None:
        self._places: Tensor | None = None
        self._groups: list[tuple[int, Tensor | None]] | None = None
        self._tiles: AdapterTiles | None = None
        self.tile_rows: Callable[[Tensor], AdapterTiles] | None = None  # of places; None: products need no tiles
        self.long_rotations: LongRotations | None = None  # None: no adapter is for longer contexts than the model

    def rotated(self, positions: Tensor) -> Tensor:
        """The rows of rotation tables for positions [tokens]."""
        if self._places is None or self.long_rotations is None:
            return positions
        return self.long_rotations.rows_of(positions, self._places)

    @property
    def is_active(self) -> bool:
        """False: no row has an adapter, and layers compute what they compute without adapters."""
        return self._places is not None

    @property
    def places(self) -> Tensor:
        """[rows] int32: the place of each row's adapter, `NO_PLACE` for none. Only while it is active."""
        assert self._places is not None
        return self._places

    @property
    def tiles(self) -> AdapterTiles | None:
        """The rows by place, for kernels; None: products need none."""
        return self._tiles

    def begin(self, places: Tensor | None) -> None:
        """Call it before rows are computed. places [rows] int32; None: no row has an adapter.

        Tiles are made here, so that other kernels run between those that write them and those that read them early.
        """
        self._places, self._groups = places, None
        self._tiles = None if places is None or self.tile_rows is None else self.tile_rows(places)

    def select(self, rows: Tensor) -> None:
        """From here on only these rows are computed: rows [n] int64."""
        if self._places is not None:
            self.begin(self._places.index_select(0, rows))

    def only(self, rows: Tensor) -> AbstractContextManager[None]:
        """Meanwhile only these rows are computed: rows [n] int64."""
        return self.meanwhile(None if self._places is None else self._places.index_select(0, rows))

    @contextmanager
    def meanwhile(self, places: Tensor | None) -> Iterator[None]:
        """Meanwhile other rows are computed: see `begin`."""
        before = self._places, self._groups, self._tiles
        self.begin(places)
        if self._tiles is not None:  # the first kernel may be one of their products
            self._tiles = replace(self._tiles, is_early=False)
        try:
            yield
        finally:
            self._places, self._groups, self._tiles = before

    def end(self) -> None:
        self.begin(None)

    def groups(self) -> list[tuple[int, Tensor | None]]:
        """Each place with its rows [n] int64, None for all rows. Waits for the device: for the CPU alone."""
        if self._groups is None:
            found = sorted(set(self.places.tolist()) - {NO_PLACE})
            if len(found) == 1 and not (self.places == NO_PLACE).any():
                self._groups = [(found[0], None)]
            else:
                self._groups = [(place, torch.nonzero(self.places == place).flatten()) for place in found]
        return self._groups
