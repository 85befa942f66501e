"""One decode step of a Llama-like model on the CPU as one call: cpp/decode_step.cpp, its weights and its reference.

Beside the kernel's own copy of the matrices nothing is held twice. K and V are read and written where they lie in a
pool's layers, [num_blocks, 2, kv_heads, block_size, head_dim].
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SOURCE = Path(__file__).parent / "cpp" / "decode_step.cpp"
LANES = 16
PANEL = 2 * LANES  # outputs that are computed together
ENTRIES = {torch.float32: "decode_float32", torch.bfloat16: "decode_bfloat16"}  # by dtype of weights and KV


@dataclass(frozen=True, slots=True)
class Weight:
    matrix: Tensor  # [out, in]
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    norm1: Tensor  # [hidden]
    qkv: Weight  # heads of q, of k and of v; pairs that are rotated lie side by side
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Weight
    norm2: Tensor
    gate_up: Weight
    down: Weight
    window: int | None  # how many of the last keys a token sees


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """RMSNorm, attention with RoPE, RMSNorm, gated SiLU, as often as there are layers; all of one dtype."""

    num_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float  # on the scores
    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor
    head: Weight


@dataclass(frozen=True, slots=True)
class Rows:
    """New tokens, those of one sequence in order."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, in their sequences
    tables: Tensor  # [rows, width] int64, blocks of the pool


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm1", "norm2", "qk_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate", "up", "down")),
        ("kv", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


_SIZES = ("num_layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "block_size")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p),
        ("head", _Matrix),
        ("embedding", ctypes.c_void_p),
        ("rotations", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "tables")),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "logits", "scratch")),
        ("threads", ctypes.c_int64),
    )


def why_not(weights: DecoderWeights) -> str:
    """What keeps the kernel from this model; empty: nothing."""
    dtype = weights.embedding.dtype
    if dtype not in ENTRIES:
        return f"{str(dtype).removeprefix('torch.')} weights"
    odd = [n for n in (weights.head_dim, weights.embedding.shape[1]) if n % LANES]
    return f"a size of {odd[0]}, which is no multiple of {LANES}" if odd else ""


def size_bytes(weights: DecoderWeights) -> int:
    """Of the copies."""
    matrices = [w.matrix for one in weights.layers for w in (one.qkv, one.out, one.gate_up, one.down)]
    return sum(m.nbytes for m in (*matrices, weights.head.matrix))


def to_panels(matrix: Tensor) -> Tensor:
    """[out, in] -> [panels, in, PANEL], rows of zeros behind the last output."""
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    if matrix.dtype == torch.float32:
        return padded.view(-1, PANEL, matrix.shape[1]).transpose(1, 2).contiguous()
    # two halves of a panel side by side: a word holds one number of each
    return padded.view(-1, 2, LANES, matrix.shape[1]).permute(0, 3, 2, 1).contiguous()


class DecodeStep:
    """The kernel's copy of a model's weights. Give it a library and a pool with `bind`, then call it."""

    def __init__(self, weights: DecoderWeights) -> None:
        """Raises ValueError for a model that `why_not` says something of."""
        if problem := why_not(weights):
            raise ValueError(f"no kernel for {problem}")
        self._held: list[Tensor] = []  # what pointers point to
        self._dtype, self._hidden, self._vocab = weights.norm.dtype, len(weights.norm), len(weights.head.matrix)
        self._layers = (_Layer * len(weights.layers))(*[self._layer(layer) for layer in weights.layers])
        self._model = _Model(
            num_layers=len(weights.layers),
            hidden=self._hidden,
            inner=weights.layers[0].down.matrix.shape[1],
            heads=weights.num_heads,
            kv_heads=weights.kv_heads,
            head_dim=weights.head_dim,
            eps=weights.eps,
            scale=weights.scale,
            layers=self._layers,
            norm=self._vector(weights.norm),
            head=self._matrix(weights.head.matrix, weights.head.bias),
            embedding=self._pointer(weights.embedding),
        )
        self._scratch = torch.empty(0)

    def bind(self, library: ctypes.CDLL, kv: Sequence[Tensor], rotations: Tensor | None, threads: int) -> None:
        """kv: the pool's layers; rotations [positions, 1, head_dim / 2] complex64; None: positions are not
        rotated."""
        for layer, memory in zip(self._layers, kv, strict=True):
            if memory.dtype != self._dtype or not memory.is_contiguous():
                raise ValueError(f"KV must be contiguous {self._dtype}, got {memory.dtype} {memory.stride()}")
            layer.kv = memory.data_ptr()
        self._model.block_size = kv[0].shape[3]
        self._model.rotations = None if rotations is None else self._pointer(rotations)
        self._run = getattr(library, ENTRIES[self._dtype])
        self._run.restype = None
        self._count = library.scratch_floats
        self._count.restype = ctypes.c_int64
        self._count.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]
        self._threads = threads

    def __call__(self, rows: Rows, logits: Tensor | None = None) -> Tensor:
        """Hidden rows [rows, hidden], normalised, float32; K and V are stored. `logits` [rows, vocab] float32 is
        filled, where given.

        Ids, positions and blocks must be of the vocabulary, the rotations and the pool: that is not checked.
        """
        num, width = rows.tables.shape
        for tensor in (rows.token_ids, rows.positions, rows.tables):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous() or len(tensor) != num:
                raise ValueError(f"rows must be contiguous int64 of {num}, got {tensor.dtype} {tuple(tensor.shape)}")
        if logits is not None and (logits.shape != (num, self._vocab) or not logits.is_contiguous()):
            raise ValueError(f"logits must be contiguous {(num, self._vocab)}, got {tuple(logits.shape)}")
        hidden = torch.empty((num, self._hidden))
        longest = width * self._model.block_size
        needed = self._count(ctypes.byref(self._model), num, longest, self._threads)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed)
        step = _Step(
            num,
            rows.token_ids.data_ptr(),
            rows.positions.data_ptr(),
            rows.tables.data_ptr(),
            width,
            hidden.data_ptr(),
            None if logits is None else logits.data_ptr(),
            self._scratch.data_ptr(),
            self._threads,
        )
        self._run(ctypes.byref(self._model), ctypes.byref(step))
        return hidden

    def _layer(self, layer: LayerWeights) -> _Layer:
        gate, up = layer.gate_up.matrix.chunk(2)
        biases = (None, None) if layer.gate_up.bias is None else layer.gate_up.bias.chunk(2)
        return _Layer(
            norm1=self._vector(layer.norm1),
            norm2=self._vector(layer.norm2),
            qk_norm=self._vector(layer.qk_norm),
            qkv=self._matrix(layer.qkv.matrix, layer.qkv.bias),
            out=self._matrix(layer.out.matrix, layer.out.bias),
            gate=self._matrix(gate, biases[0]),
            up=self._matrix(up, biases[1]),
            down=self._matrix(layer.down.matrix, layer.down.bias),
            window=layer.window or 0,
        )

    def _matrix(self, matrix: Tensor, bias: Tensor | None) -> _Matrix:
        out_features, in_features = matrix.shape
        return _Matrix(self._pointer(to_panels(matrix)), self._vector(bias), in_features, out_features)

    def _vector(self, vector: Tensor | None) -> int | None:
        return None if vector is None else self._pointer(vector.float())

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


def decode_step_reference(
    weights: DecoderWeights, kv: Sequence[Tensor], rotations: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """The same in float64, row by row."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + weights.eps).sqrt() * weight.double()

    def product(x: Tensor, weight: Weight) -> Tensor:
        return F.linear(x, weight.matrix.double(), None if weight.bias is None else weight.bias.double())

    def attend(layer: LayerWeights, memory: Tensor, qkv: Tensor, row: int) -> Tensor:
        position, size = int(rows.positions[row]), memory.shape[3]
        heads = qkv.view(-1, weights.head_dim)
        qk, v = heads[: -weights.kv_heads], heads[-weights.kv_heads :]
        if layer.qk_norm is not None:
            qk = norm(qk, layer.qk_norm)
        pairs = torch.view_as_complex(qk.reshape(len(qk), -1, 2)) * rotations[position].to(torch.complex128)
        q, k = torch.split(torch.view_as_real(pairs).flatten(1), [weights.num_heads, weights.kv_heads])
        memory[rows.tables[row, position // size], :, :, position % size] = torch.stack((k, v)).to(memory.dtype)
        known = memory[rows.tables[row]].double().permute(1, 2, 0, 3, 4).flatten(2, 3)
        first = 0 if layer.window is None else max(position + 1 - layer.window, 0)
        keys, values = known[:, :, first : position + 1]
        grouped = q.view(weights.kv_heads, -1, weights.head_dim)
        attended: Tensor = (grouped @ keys.mT * weights.scale).softmax(-1) @ values
        return attended.flatten()

    x = F.embedding(rows.token_ids, weights.embedding).double()
    for layer, memory in zip(weights.layers, kv, strict=True):
        qkv = product(norm(x, layer.norm1), layer.qkv)
        x = x + product(torch.stack([attend(layer, memory, one, i) for i, one in enumerate(qkv)]), layer.out)
        gate, up = product(norm(x, layer.norm2), layer.gate_up).chunk(2, -1)
        x = x + product(F.silu(gate) * up, layer.down)
    hidden = norm(x, weights.norm)
    return hidden, product(hidden, weights.head)
