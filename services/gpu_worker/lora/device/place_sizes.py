"""What a place of a device must hold at most: the matrices and rows of the largest adapter that may be placed."""

from collections.abc import Iterator, Sequence

from blockyard.services.gpu_worker.layers.embedding import HEAD
from blockyard.services.gpu_worker.layers.moe.expert_matrices import AdaptableExpert
from blockyard.services.gpu_worker.lora.device.adapter_pages import PageLayout, aligned
from blockyard.services.gpu_worker.lora.module_tensors import EXPERTS, last_name
from blockyard.services.gpu_worker.lora.ranks.layer_share import LayerShare
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import AdaptedLayer, ModelTargets, adapted_layers
from blockyard.services.gpu_worker.models.interface import Model

PAGE_BYTES = 2 << 20  # at least, and as many as the largest matrix has
QUARTERS = range(4, 17)  # of that, sizes of pages to choose from
MOST_MORE = 1.05  # memory of a smaller page to that of the best size: adapters with small pages share memory better


class TokenSizes:
    """What a place has for rows of tokens."""

    def __init__(self, model: Model, limits: AdapterLimits) -> None:
        stage, embedding, head = model.table.stage, model.adaptable.embedding, ModelTargets(model).find(HEAD)
        self.has_embedding = embedding is not None and is_allowed(embedding.name, limits)
        self.has_embedding = self.has_embedding and (stage is None or stage.is_first)
        is_head = head is not None and is_allowed(head.name, limits)
        self.head_layer = head.layer if head is not None and is_head else None
        may_add = embedding is not None and is_allowed(embedding.name, limits)
        # the leader has the logits of all ranks
        self.num_extra = limits.max_rows if may_add and is_head and model.table.shard.rank == 0 else 0
        has_last = embedding is not None and embedding.own_tokens.stop == embedding.vocab_size
        self._most_added = limits.max_rows if has_last else 0  # rows of the embedding behind the vocabulary
        self.most_embedding = limits.max_rows + self._most_added
        self.vocab_size = model.shape.vocab_size
        self._width = 0 if embedding is None else embedding.weight.shape[1]
        self._head_width = 0 if head is None else adapted_layers(model)[head.layer].spec.in_features
        self._num_tokens = 0 if embedding is None else len(embedding.own_tokens)

    def counts(self, limits: AdapterLimits) -> list[int]:
        """Elements of the most rows and of the largest matrices, in the order in which an adapter's are packed."""
        found = list[int]()
        if self.has_embedding:
            found.append(self.most_embedding * self._width)
            found.append(limits.max_rank * (self._num_tokens + self._most_added))
            found.append(limits.max_rank * self._width)
        if self.head_layer is not None:
            found += [limits.max_rows * self._head_width, self.num_extra * self._head_width]
        return found


def is_allowed(name: str, limits: AdapterLimits) -> bool:
    return not limits.target_modules or last_name(name) in limits.target_modules


def has_place(layer: AdaptedLayer, limits: AdapterLimits) -> bool:
    """Whether an adapter may change a layer. Experts take much memory, and only if they are asked for."""
    if isinstance(layer, AdaptableExpert) and EXPERTS in limits.target_modules:
        return True
    if isinstance(layer, AdaptableExpert) and not limits.target_modules:
        return limits.with_experts
    return any(is_allowed(one.name, limits) for one in layer.spec.parts)


def largest_counts(
    layers: Sequence[AdaptedLayer], shares: Sequence[LayerShare], limits: AdapterLimits
) -> Iterator[int]:
    """Elements of each matrix of the largest adapter, of a rank, in the order in which an adapter's are packed."""
    for layer, share in zip(layers, shares, strict=True):
        if not has_place(layer, limits):
            continue
        own_rank = max(-(-limits.max_rank // share.num_shrunk), 1)
        for one, size in zip(layer.spec.parts, share.sizes, strict=True):
            if isinstance(layer, AdaptableExpert) or is_allowed(one.name, limits):
                yield own_rank * len(share.inputs)
                yield limits.max_rank * size
                if limits.with_bias:
                    yield size


def place_layout(counts: Sequence[int], item_size: int) -> PageLayout:
    """The pages of a place that has matrices of so many elements. A matrix fits one page.

    The size of pages leaves little memory unused: where two matrices almost fit a page, that may be a third of it.
    """
    sizes = [aligned(count) for count in counts] or [0]
    least = max(*sizes, min(PAGE_BYTES // item_size, sum(sizes)), 1)
    layouts = [PageLayout(aligned(least * quarters // 4)) for quarters in QUARTERS]
    for layout in layouts:
        for count in counts:
            layout.add(count)
    most = MOST_MORE * min(layout.size for layout in layouts)
    return next(layout for layout in layouts if layout.size <= most)
