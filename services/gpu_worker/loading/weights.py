"""The places of a model's weights under the names of the checkpoint, and which are loaded."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import HostLink, SameMemory
from blockyard.services.gpu_worker.loading.checkpoint_names import PREFIXES, TEXT_PART
from blockyard.services.gpu_worker.loading.expert_loads import ExpertLoads, LayerLoad
from blockyard.services.gpu_worker.loading.linear_spec import Arrange
from blockyard.services.gpu_worker.loading.tensor_groups import Convert, StoredTensor, TensorGroup
from blockyard.services.gpu_worker.loading.tensor_headers import TensorHeaders
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard
from blockyard.services.gpu_worker.parallel.stages import Stage
from blockyard.shared.errors import LoadError

Write = Callable[[Tensor, Tensor], None]  # takes the target and what the checkpoint has
Fill = Callable[[Tensor, torch.Generator], None]  # writes dummy values to the target
Kind = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor

NO_MEMORY = torch.device("meta")
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
HOST_SLACK = 0.5  # bytes; rounding of a share
# last parts of names of tables and masks that a model computes itself; releases of all families have some of them
COMPUTED = (
    *("inv_freq", "original_inv_freq", "full_attention_inv_freq", "sliding_attention_inv_freq", "long_inv_freq"),
    *("cos_cached", "sin_cached", "masked_bias", "causal_mask", "position_ids"),
)


@dataclass(frozen=True, slots=True)
class HostShare:
    """The parts of the layers' weights that are in host memory, from 0 to 1."""

    matrices: float = 0.0
    experts: float = 0.0  # stacked weights of experts

    def bytes_of(self, table: "WeightTable") -> int:
        return int(self.matrices * table.matrix_bytes + self.experts * table.expert_bytes)


ALL_ON_DEVICE = HostShare()


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Part of a parameter, and how the checkpoint has it."""

    target: Tensor
    shape: tuple[int, ...]
    arrange: Arrange | None
    stored: frozenset[torch.dtype]  # dtypes that the checkpoint may have; they are converted to the target's
    write: Write | None  # writes a stored weight to the target; None: copies it
    fill: Fill | None  # makes dummy weights; None: small random numbers, or by the name
    other_shapes: tuple[tuple[int, ...], ...] = ()  # that the checkpoint may have instead; -1 stands for any size
    cut: Arrange | None = None  # takes a rank's share of the arranged tensor; None: the rank has the whole

    def own(self, stored: Tensor) -> Tensor:
        """Returns what goes to the target."""
        how = after(self.arrange, self.cut)
        return stored if how is None else how(stored)

    def whole_shape(self, device: torch.device) -> tuple[int, ...]:
        """The shape of the target, if it had the shares of all ranks.

        device: where a whole weight is arranged. Not the meta device: there torch imports its compiler to join
        tensors, which takes it a second or more.
        """
        if self.cut is None:
            return tuple(self.target.shape)
        if self.arrange is None:
            return self.shape
        return tuple(self.arrange(torch.empty(self.shape, dtype=self.target.dtype, device=device)).shape)


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """A weight that is another one, `source`, unless the checkpoint has its own."""

    source: str
    shape: tuple[int, ...]
    use_own: Callable[[Tensor], None]


class WeightTable:
    """A model allocates its parameters here, each under the names that checkpoints use."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, host_share: HostShare = ALL_ON_DEVICE, shard: Shard = WHOLE
    ) -> None:
        """host_share: of the layers' weights, spread over the layers. shard: the rank's share of them to load."""
        self.dtype, self.device, self.shard = dtype, device, shard
        self.ranks: RankGroup | None = (
            None  # that add their partial sums; None: one rank, or the model is only declared
        )
        self.stage: Stage | None = None  # None: the model has all layers
        self.whole: WeightTable | None = None  # of the declared model with all layers, if there are stages
        self.spreads_experts = False  # a rank has some experts whole, and not a share of each
        self.replica = WHOLE  # this worker among those that have the experts together
        self.exchange: ExpertExchange | None = None  # with their ranks; None: there is one, or the model is declared
        self.moves_experts = False  # these are moved by their loads
        self.headers = TensorHeaders()  # of the checkpoint, if it is quantized
        self.link: HostLink = SameMemory()  # of `device`, to host memory
        self.matrix_bytes = self.expert_bytes = 0  # of the layers' matrices and of their experts, on device and host
        self.matrices_on_host: list[Tensor] = []
        self.experts_on_host: list[Tensor] = []
        self.expert_loads: ExpertLoads | None = None  # None: how often experts are chosen is not counted
        self._host_share = host_share
        self.places: dict[str, WeightPlace] = {}
        self._wholes: dict[str, tuple[WeightPlace, tuple[str, ...]]] = {}  # see `place_whole`
        self.scalars: dict[str, Tensor] = {}  # by name; a checkpoint may lack them
        self.size_bytes = 0
        self._ignored: set[str] = set()
        self._elsewhere: set[str] = set()  # names of weights that other ranks have
        self._aliases: dict[str, str] = {}
        self._tied: dict[str, TiedWeight] = {}  # by name
        self._untied: list[str] = []  # names of tied weights that the checkpoint stores by themselves
        self._unused: dict[str, set[str]] = {}  # names in the checkpoint, of parts that are not used, by prefix
        # the same by suffix
        self._unused_last: dict[str, set[str]] = {f".{name}": set() for name in COMPUTED}
        self._unused_alone: set[str] = set()  # the same, of `_ignored`
        self._loaded: set[str] = set()
        self._finishes: list[Callable[[], None]] = []
        self._groups: dict[str, tuple[TensorGroup, str]] = {}  # by name, with the key there
        self._optional: set[str] = set()  # names of groups that a checkpoint may lack
        self._notes: dict[str, dict[str, None]] = {}  # note -> names, in order

    @property
    def adapts_experts(self) -> bool:
        """Whether adapters may change experts. Not where rows of other workers reach them, which come without their
        adapter, and not where they move, which their parts of adapters do not."""
        return self.exchange is None and not self.moves_experts

    @property
    def has_memory(self) -> bool:
        """False: the model is only declared, on the meta device."""
        return self.device != NO_MEMORY

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of the device. dtype: None for the model's."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.size_bytes += tensor.nbytes
        return tensor

    def place(
        self,
        name: str,
        target: Tensor,
        shape: tuple[int, ...],
        arrange: Arrange | None = None,
        stored: frozenset[torch.dtype] = FLOATS,
        *,
        cut: Arrange | None = None,
        fill: Fill | None = None,
    ) -> None:
        """A checkpoint's `name` of `shape` goes to `target`, rows rearranged; a smaller shape is repeated.

        stored: the dtypes that the checkpoint may have there. Weights of a quantization format name theirs. cut: takes
        the share of `shard` of the rearranged tensor. fill: see `WeightPlace`.
        """
        self.places[name] = WeightPlace(target, shape, arrange, stored, None, fill, cut=cut)

    def place_whole(self, name: str, place: WeightPlace, parts: Sequence[str]) -> None:
        """A checkpoint may have one weight `name` in place of all `parts`, which have places of their own."""
        self._wholes[name] = place, tuple(parts)

    def place_group(
        self, tensors: Mapping[str, StoredTensor], convert: Convert, fill: Callable[[torch.Generator], None]
    ) -> None:
        """`convert` is called with these tensors by key once all have come, from any thread.

        It writes to memory that the caller has. fill: writes dummy values there.
        """
        group = TensorGroup(tensors, convert, self.link)
        for i, (key, one) in enumerate(tensors.items()):
            target = torch.empty(0, device=self.device)
            self.places[one.name] = WeightPlace(
                target,
                one.shape,
                arrange=None,
                stored=one.dtypes,
                write=partial(_put_in_group, group, key),
                fill=partial(_fill_group, None if i else fill),
                other_shapes=one.other_shapes,
            )
            self._groups[one.name] = group, key
            if one.optional:
                self._optional.add(one.name)
            for other in one.other_names:
                self.alias(other, one.name)
        self.after_load(group.finish)

    def expect(self, names: Collection[str]) -> None:
        """The checkpoint has these names and no others. Groups then do not wait for what it lacks."""
        known = {self._known(name) for name in names}
        for name in self._optional - known:
            group, key = self._groups[name]
            group.lack(key)

    def note(self, what: str, name: str) -> None:
        """Something was done to the matrix `name` that the start's report says, for all such matrices in one line."""
        self._notes.setdefault(what, {})[name] = None

    def after_load(self, finish: Callable[[], None]) -> None:
        """`finish` runs once all weights are in their places, before the model prepares them."""
        self._finishes.append(finish)

    def finish(self) -> None:
        for finish in self._finishes:
            finish()
        self._finishes.clear()
        for name in self._groups:  # nothing here keeps what the layers may have given up
            self.places[name] = replace(self.places[name], write=None, fill=None)
        self._groups.clear()
        for name in self._tied.keys() & self.places.keys():
            self._settle_tied(name, self._tied[name])

    def forget(self, name: str) -> None:
        """Drops the place of a loaded weight, and with it the memory that nothing else uses."""
        self.size_bytes -= self.places.pop(name).target.nbytes

    def tie(self, name: str, source: str, use_own: Callable[[Tensor], None]) -> None:
        """The weight `name` is the matrix `source`, unless the checkpoint has `name` with other values.

        use_own: is given these values. A checkpoint that has `name` alone has `source` by that name.
        """
        self._tied[name] = TiedWeight(source, self.places[source].shape, use_own)

    def _settle_tied(self, name: str, tied: TiedWeight) -> None:
        """Decides which values a tied weight has that the checkpoint has, too."""
        own, source = self.places[name].target, self.places[tied.source].target
        if tied.source not in self._loaded:
            source.copy_(own)
        elif not torch.equal(own, source):
            tied.use_own(own)
            self._untied.append(name)
            return
        else:
            self._unused_alone.add(name)
        self.forget(name)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that have places in here."""
        yield from (place.target for place in self.places.values())
        yield from self.scalars.values()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights by name, also of tied ones."""
        tied = {name: one.shape for name, one in self._tied.items()}
        return {name: place.shape for name, place in self.places.items()} | tied

    def rename(self, name: str, stored: str) -> None:
        """Checkpoints call the weight `name` `stored`. Both names are known from here on."""
        if name in self._tied:
            self._tied[stored] = self._tied.pop(name)
        else:
            self.places[stored] = self.places.pop(name)
            if name in self._groups:
                self._groups[stored] = self._groups.pop(name)
            if name in self._optional:
                self._optional.remove(name)
                self._optional.add(stored)
            for other, tied in self._tied.items():
                if tied.source == name:
                    self._tied[other] = replace(tied, source=stored)
        self.alias(name, stored)

    def place_scalar(self, name: str, target: Tensor) -> None:
        """A checkpoint that has the scalar `name` sets `target`; it may lack it."""
        self.scalars[name] = target

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        target = self.empty(rows, columns)
        self.place(name, target, (rows, columns))
        return target

    def layer_memory(self, name: str, *wanted: Kind) -> list[Tensor]:
        """Memory of all tensors of a matrix, together on the device or, as the host's share says, pinned in the host's.

        name: of the matrix in the checkpoint. Matrices outside of the layers are on the device.
        """
        if not any(layer in name for layer in (".layers.", ".h.", ".layer.")):  # names of GPT-2 and BERT
            return [self.empty(*shape, dtype=dtype) for shape, dtype in wanted]
        self.matrix_bytes += _size_bytes(wanted)
        return self._within(self._host_share.matrices * self.matrix_bytes, self.matrices_on_host, wanted)

    def expert_memory(self, *wanted: Kind) -> list[Tensor]:
        """As `layer_memory`, of the matrices of all experts of a layer."""
        self.expert_bytes += _size_bytes(wanted)
        return self._within(self._host_share.experts * self.expert_bytes, self.experts_on_host, wanted)

    def _within(self, most_bytes: float, on_host: list[Tensor], wanted: Sequence[Kind]) -> list[Tensor]:
        """Memory of the host, added to `on_host`, if that then has at most `most_bytes`; else memory of the device."""
        size = _size_bytes(wanted)
        if sum(one.nbytes for one in on_host) + size > most_bytes + HOST_SLACK:
            return [self.empty(*shape, dtype=dtype) for shape, dtype in wanted]
        self.size_bytes += size
        make = self.link.host_tensor if self.has_memory else self._declared
        made = [make(shape, dtype) for shape, dtype in wanted]
        on_host += made
        return made

    def _declared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def vector(self, name: str, size: int) -> Tensor:
        target = self.empty(size)
        self.place(name, target, (size,))
        return target

    def expert_load(self, num_experts: int) -> LayerLoad | None:
        """Where the products of the next layer with experts count how often each is chosen. None: nowhere."""
        return None if self.expert_loads is None else self.expert_loads.add_layer(num_experts)

    def ignore(self, name: str) -> None:
        """The checkpoint may have a weight `name`, which the model does not use."""
        self._ignored.add(name)

    def leave_to_others(self, name: str) -> None:
        """The checkpoint has a weight `name`, which another rank has whole."""
        self._elsewhere.add(name)

    def ignore_suffix(self, suffix: str) -> None:
        """Names that end so are of weights that the model does not use."""
        self._unused_last[suffix] = set()

    def alias(self, other: str, name: str) -> None:
        """Some checkpoints call the weight `name` by another name."""
        self._aliases[other] = name

    def leave_out(self, *prefixes: str) -> None:
        """Names that begin so, also behind "model.", belong to parts that this worker does not use."""
        for prefix in prefixes:
            self._unused[prefix] = set()

    def describe_unused(self) -> list[str]:
        """Returns lines that name parts of the checkpoint that are not used, or are not used as config.json says."""
        parts = self._unused | self._unused_last
        for name in sorted(self._unused_alone):
            parts.setdefault(".".join(name.split(".")[-2:]), set()).add(name)  # of all layers together
        found = [
            f"{len(names)} tensor{'s' * (len(names) > 1)} of {part.strip('.')}"
            for part, names in parts.items()
            if names
        ]
        own = [f"{name}: the checkpoint's own, although tie_word_embeddings is true" for name in self._untied]
        notes = [f"{what}: {_shortened([*names])}" for what, names in self._notes.items()]
        return [*([f"not used: {', '.join(found)}"] if found else []), *own, *notes]

    def names_besides_groups(self) -> set[str]:
        """Names, without their last parts, of weights that are placed one by one, not by `place_group`, and of what the
        checkpoint has and this worker does not use."""
        names = (self.places.keys() - self._groups.keys()).union(*self._unused.values())
        if self.whole is not None:
            names |= self.whole.places.keys()
        return {name.rpartition(".")[0] for name in names}

    def wants(self, name: str) -> bool:
        """Whether the model needs this name. Raises LoadError for an unknown one."""
        known = self._known(name)
        if known in self._tied and known not in self.places:
            source = self.places[self._tied[known].source]
            self.places[known] = replace(source, target=self.empty(*source.target.shape, dtype=source.target.dtype))
        if known in self._elsewhere:
            return False
        if self._has(known):
            return True
        if name.replace(TEXT_PART, "") in self._ignored:
            self._unused_alone.add(name)
            return False
        for suffix, names in self._unused_last.items():
            if name.endswith(suffix):
                names.add(name)
                return False
        for prefix, names in self._unused.items():
            if name.startswith((prefix, f"model.{prefix}")):
                names.add(name)
                return False
        if self.whole is not None:
            self.whole.wants(name)  # raises if no stage has it
            return False
        raise LoadError(f"the checkpoint has a weight that the model does not: {name}")

    def put(self, name: str, value: Tensor) -> None:
        """Copies one weight in, converted to the dtype of its place. Raises LoadError if the shape is not the config's
        or the place does not take the dtype."""
        name = self._known(name)
        self.mark_loaded(name, tuple(value.shape), value.dtype)
        if name in self.scalars:
            self.scalars[name].copy_(value.reshape(()))
            return
        place = self._place(name)
        if place.write is not None:
            place.write(place.target, value)
            return
        place.target.copy_(place.own(value))

    def share_of(self, name: str, shape: tuple[int, ...]) -> Arrange | None:
        """Returns what takes this rank's share of a weight of the checkpoint, for `put_share`. None: `put` it whole."""
        name = self._known(name)
        place = None if name in self.scalars else self._place(name)
        if place is None or place.cut is None or place.write is not None or shape != place.shape:
            return None
        return after(place.arrange, place.cut)

    def put_share(self, name: str, share: Tensor, shape: tuple[int, ...]) -> None:
        """As `put`, of what `share_of` has taken of a weight of `shape`."""
        self.mark_loaded(name, shape, share.dtype)
        self._place(self._known(name)).target.copy_(share)

    def mark_loaded(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Marks a weight as loaded. Raises LoadError if its shape differs from the config's, or the place does not take
        the dtype."""
        name = self._known(name)
        if name in self.scalars:
            if math.prod(shape) != 1:
                raise LoadError(f"{name}: the checkpoint has {list(shape)}, expected one number")
            return
        place = self._place(name)
        if shape != place.shape and not any(_fits(shape, other) for other in place.other_shapes):
            raise LoadError(f"{name}: the checkpoint has {list(shape)}, config.json means {list(place.shape)}")
        if dtype not in place.stored:
            known = ", ".join(sorted(str(one).removeprefix("torch.") for one in place.stored))
            raise LoadError(f"{name}: the checkpoint has {str(dtype).removeprefix('torch.')}, expected {known}")
        self._loaded.update(self._wholes[name][1] if name in self._wholes else (name,))

    def _place(self, name: str) -> WeightPlace:
        return self._wholes[name][0] if name in self._wholes else self.places[name]

    def _known(self, name: str) -> str:
        """The name in the table. Checkpoints of a bare decoder lack the first part, those of a model that also sees
        or hears have one more."""
        if self._has(name):
            return name
        bare = name.replace(TEXT_PART, "")
        for prefix in PREFIXES:
            longer = prefix + bare
            longer = self._aliases.get(longer, longer)
            if self._has(longer):
                return longer
        return name

    def _has(self, name: str) -> bool:
        return any(name in named for named in (self.places, self.scalars, self._tied, self._wholes, self._elsewhere))

    def check_complete(self) -> None:
        by_other_name = {tied.source for name, tied in self._tied.items() if name in self._loaded}
        missing = sorted(self.places.keys() - self._loaded - by_other_name - self._optional)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise LoadError(f"the checkpoint lacks {missing[0]}{more}")


def after(first: Arrange | None, then: Arrange | None) -> Arrange | None:
    """Both functions, one behind the other."""
    if first is None or then is None:
        return first or then
    return lambda stored: then(first(stored))


def _fits(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and all(size in (-1, own) for own, size in zip(shape, other, strict=True))


def _put_in_group(group: TensorGroup, key: str, _: Tensor, value: Tensor) -> None:
    group.put(key, value)


def _fill_group(fill: Callable[[torch.Generator], None] | None, _: Tensor, generator: torch.Generator) -> None:
    """fill: None for all places of a group but one."""
    if fill is not None:
        fill(generator)


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def _size_bytes(wanted: Sequence[Kind]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in wanted)
