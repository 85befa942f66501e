"""Linear layers with the same input as one product, rotations inside of it, and its output as attention reads it."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blockyard.services.gpu_worker.layers.fused_ops import TorchOps
from blockyard.services.gpu_worker.layers.linear import dense_linear
from blockyard.services.gpu_worker.models.transformers_layers.attention_input import join_qkv
from blockyard.services.gpu_worker.models.transformers_layers.joint_products import (
    JointProduct,
    find_joint,
)
from blockyard.services.gpu_worker.models.transformers_layers.module_calls import recorded_calls
from blockyard.services.gpu_worker.models.transformers_layers.rotations import HalvesRotation, LaterReads

Forward = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 16, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.biased, self.out = nn.Linear(8, 4), nn.Linear(8, 8, bias=False)
        self._own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._own(self, x)


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def in_place_between(b: Block, x: Tensor) -> Tensor:
    b.q(x)
    return b.k(x.mul_(2))


def other_class(b: Block, x: Tensor) -> Tensor:
    b.k = Other(8, 4, device="meta")
    b.q(x)
    return b.k(x)


def shared(b: Block, x: Tensor) -> Tensor:
    b.v.weight = b.k.weight
    b.q(x)
    b.k(x)
    return b.v(x)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda b, x: (b.q(x), b.k(x), b.v(x)), [("q", "k", "v")]),
        (lambda b, x: (b.v(x), b.q(input=x), b.out(x.clone())), [("v", "q")]),
        (lambda b, x: (b.q(x), b.k(2 * x)), []),
        (lambda b, x: (b.q(x), b.k(x.view(3, 8))), []),
        (lambda b, x: (b.q(x), b.biased(x)), []),
        (lambda b, x: (b.q(x), b.k(x), b.q(x)), []),
        (in_place_between, []),
        (other_class, []),
        (shared, []),
    ],
)
def test_layers_that_multiply_the_same_tensor(forward: Forward, expected: list[tuple[str, ...]]) -> None:
    with torch.device("meta"):
        root = nn.ModuleDict({"block": Block(forward)})
        if forward is other_class or forward is shared:
            with torch.no_grad():
                root["block"](torch.ones(1, 3, 8))
        with recorded_calls(root) as calls, torch.no_grad():
            root["block"](torch.ones(1, 3, 8))
    assert find_joint(root, calls.linears) == [tuple(f"block.{name}" for name in names) for names in expected]


def test_layers_of_two_modules_stay_apart() -> None:
    with torch.device("meta"), torch.no_grad():
        root = nn.ModuleDict({name: Block(lambda b, x: b.q(x)) for name in "ab"})
        x = torch.ones(1, 3, 8)
        with recorded_calls(root) as calls:
            root["a"](x)
            root["b"](x)
    assert [call.name for call in calls.linears] == ["a.q", "b.q"] and find_joint(root, calls.linears) == []


class Counted:
    """A product of two parts, 3 and 2 wide, that counts how often it is computed."""

    def __init__(self) -> None:
        self.weight, self.count = torch.randn(5, 4), 0
        linear = dense_linear(self.weight)
        linear.use({}, self._multiply)
        self.product = JointProduct(linear, (3, 2))

    def _multiply(self, x: Tensor) -> Tensor:
        self.count += 1
        return x @ self.weight.t()


def test_one_product_for_all_parts_of_an_input() -> None:
    counted, x = Counted(), torch.randn(1, 6, 4)
    take = counted.product.take
    first, second = take(0, x), take(1, x)
    torch.testing.assert_close(torch.cat((first, second), -1), x @ counted.weight.t())
    assert counted.count == 1 and counted.product.owns(first) and counted.product.owns(second.transpose(0, 1))
    take(1, x)
    assert counted.count == 2, "the same part again: the tensor may have been written to"
    take(0, x)
    assert counted.count == 2
    y = x.clone()
    take(0, x)
    torch.testing.assert_close(take(1, y), y @ counted.weight.t()[:, 3:])
    assert counted.count == 4, "another tensor with the same numbers"
    assert not counted.product.owns(first) and not counted.product.owns(x)


def test_no_tensor_is_kept() -> None:
    counted = Counted()
    x = torch.randn(2, 4)
    seen = weakref.ref(x)
    parts = counted.product.take(0, x), counted.product.take(1, x)
    del x, parts
    gc.collect()
    assert seen() is None
    x = torch.randn(2, 4)
    seen = weakref.ref(x)
    counted.product.take(0, x)
    counted.product.forget()
    del x
    gc.collect()
    assert seen() is None
    counted.product.take(1, torch.randn(2, 4))
    assert counted.count == 3


def heads(x: Tensor, count: int) -> Tensor:
    return x.view(1, -1, count, 4).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("width", [24, 40])
def test_side_by_side_is_a_view(tokens: int, width: int) -> None:
    """In rows that may be longer."""
    wide = torch.randn(tokens, width)
    q, k, v = heads(wide[:, :16], 4), heads(wide[:, 16:20], 1), heads(wide[:, 20:24], 1)
    joined = join_qkv(q, k, v)
    assert joined.data_ptr() == wide.data_ptr() and torch.equal(joined, wide[:, :24].view(tokens, 6, 4))
    others = [(q, k.clone(), v), (q, v, k), (k, k, v), (q, k, k), (q[:, ::2], k, v), (q[:, :3], k, v), (q, k, v + 0)]
    if tokens > 1:
        longer = torch.as_strided(wide, (1, 1, tokens, 4), (4, 4, 4, 1), 20)
        others += [(q, k, longer)]
    for parts in others:
        joined = join_qkv(*parts)
        assert joined.is_contiguous() and joined.data_ptr() != wide.data_ptr()
        assert torch.equal(joined, torch.cat([part[0].transpose(0, 1) for part in parts], 1))


def rotated_in_place(body: Callable[[Tensor, Tensor, Tensor, HalvesRotation], None]) -> set[str]:
    """What `LaterReads` finds in code that gets q, k and v in a product, and a rotation."""
    reads = LaterReads()
    with torch.device("meta"), torch.no_grad():
        product = JointProduct(dense_linear(torch.ones(24, 8)), (16, 4, 4))
        x = torch.ones(1, 3, 8)
        parts = [heads(product.take(i, x), count) for i, count in enumerate((4, 1, 1))]
        with reads:
            body(*parts, HalvesRotation(lambda *_: None, reads.rotate_of("module"), [product]))  # type: ignore[call-arg]
    return reads.rotated - reads.found


def angles() -> tuple[Tensor, Tensor]:
    return torch.ones(1, 3, 4, device="meta"), torch.ones(1, 3, 4, device="meta")


def new_tensors_read(q: Tensor, k: Tensor, v: Tensor, rotate: HalvesRotation) -> None:
    q, k = rotate(q, k, *angles())
    (q * 2, k + 1, v.clone().transpose(1, 2))


def q_read_later(q: Tensor, k: Tensor, v: Tensor, rotate: HalvesRotation) -> None:
    rotate(q, k, *angles())
    torch.sigmoid(q[:, 1:2])


def keys_are_values(q: Tensor, k: Tensor, v: Tensor, rotate: HalvesRotation) -> None:
    v = k
    rotate(q, k, *angles())
    v.clone()


def overlapping(q: Tensor, k: Tensor, v: Tensor, rotate: HalvesRotation) -> None:
    rotate(q, q[:, :1], *angles())


def repeated(q: Tensor, k: Tensor, v: Tensor, rotate: HalvesRotation) -> None:
    rotate(q, k.expand(1, 4, 3, 4), *angles())


def copied(q: Tensor, k: Tensor, v: Tensor, rotate: HalvesRotation) -> None:
    rotate(q.clone(), k, *angles())


@pytest.mark.parametrize("body", [q_read_later, keys_are_values, overlapping, repeated, copied])
def test_no_rotation_in_place_where_q_and_k_are_read(body: Callable[..., None]) -> None:
    assert rotated_in_place(new_tensors_read) == {"module"}
    assert rotated_in_place(body) == set()


def test_rotation_inside_a_product() -> None:
    product = JointProduct(dense_linear(torch.randn(24, 8)), (16, 4, 4))
    x, cos, sin = torch.randn(1, 3, 8), torch.randn(1, 3, 4), torch.randn(1, 3, 4)

    def parts() -> list[Tensor]:
        return [heads(product.take(i, x), count) for i, count in enumerate((4, 1, 1))]

    q, k, v = parts()
    rotate = HalvesRotation(lambda *_: None, TorchOps().rotate_halves, [product])
    expected = TorchOps().rotate_halves(q, k, cos, sin, False)
    turned = rotate(q, k, cos, sin)
    assert turned[0] is q and turned[1] is k and torch.equal(v, parts()[2])
    for one, other in zip(turned, expected, strict=True):
        torch.testing.assert_close(one, other)
    q, k, _ = parts()
    turned = rotate(q, k.clone(), cos, sin)
    assert turned[0] is not q and torch.equal(q, parts()[0])
