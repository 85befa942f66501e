"""One program of a launch: all its threads in step. Branches go forward, or are uniform among threads that have not
gone forward; registers keep bits."""

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ptx.instructions import BITWISE, extract, f32, floats, half, integers, of_f32, of_half, signed
from ptx.memory import Bits, Memory, Shared

Line = tuple[str, str, list[str]]  # predicate or none, instruction, operands
WIDTHS = {"8": 8, "16": 16, "32": 32, "64": 64}
MASKS = {width: np.uint64((1 << width) - 1) for width in (8, 16, 32, 64)}
FLOAT8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}
WITHOUT_EFFECT = ("bar", "barrier", "griddepcontrol", "fence", "prefetch", "membar")


class Program:
    """One program of a launch."""

    def __init__(
        self, lines: Sequence[Line], labels: dict[str, int], params: dict[str, int],
        memory: Memory, threads: int, ids: tuple[int, int, int], grid: tuple[int, int, int], shared: int,
    ) -> None:  # fmt: skip
        self._lines, self._labels, self._params, self._memory = lines, labels, params, memory
        self._shared, self._threads = Shared(max(shared, 16)), threads
        self._registers: dict[str, Bits] = {}
        number = np.arange(threads, dtype=np.uint64)
        self._special = {"%tid.x": number, "%laneid": number % np.uint64(32), "%warpid": number // np.uint64(32)}
        for axis, own, count in zip("xyz", ids, grid, strict=True):
            self._special[f"%ctaid.{axis}"] = self._full(own)
            self._special[f"%nctaid.{axis}"] = self._full(count)
        self._special["%ntid.x"] = self._full(threads)

    def _full(self, number: int) -> Bits:
        return np.full(self._threads, number % (1 << 64), np.uint64)

    def _get(self, name: str, width: int = 64) -> Bits:
        if name in self._registers:
            value = self._registers[name]
            return value if value.dtype == bool else value & MASKS[width]
        if name in self._special:
            return self._special[name]
        if name in ("global_smem", "smem"):
            return self._full(0)
        if name.startswith("0f"):
            return self._full(int(name[2:], 16))
        assert re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", name), name
        return self._full(int(name.removesuffix("U"), 0)) & MASKS[width]

    def _predicate(self, name: str) -> Bits:
        if name in ("-1", "0"):
            return np.full(self._threads, name == "-1")
        return self._registers[name.removeprefix("!")] ^ name.startswith("!")

    def _set(self, name: str, value: Bits, wanted: Bits) -> None:
        old = self._registers.get(name)
        if wanted.all() or old is None:
            self._registers[name] = value
        else:
            self._registers[name] = np.where(wanted, value, old)

    def run(self) -> None:
        at = 0
        begins = np.zeros(self._threads, np.int64)  # the line before which a thread that has branched does nothing
        while at < len(self._lines):
            guard, op, args = self._lines[at]
            wanted = begins <= at
            if guard:
                wanted = wanted & self._predicate(guard)
            at += 1
            parts = op.split(".")
            if parts[0] == "ret":
                if wanted.all():
                    return
                assert not wanted.any(), "a return of some threads"
            elif parts[0] == "bra":
                target = self._labels[args[0]]
                if wanted.all() or (target < at and wanted.any()):
                    assert wanted[begins < at].all(), "some threads go back, and others on"
                    begins[wanted], at = 0, target
                else:
                    begins[wanted] = target
            elif parts[0] not in WITHOUT_EFFECT:
                self._step(parts, args, wanted)

    def _address(self, text: str) -> Bits:
        inner = text.strip("[] ")
        name, *offset = re.split(r"\s*\+\s*", inner)
        return self._get(name) + np.uint64(int(offset[0], 0) % (1 << 64) if offset else 0)

    def _step(self, parts: list[str], args: list[str], wanted: Bits) -> None:
        name = parts[0]
        if name == "ld" and parts[1] == "param":
            self._set(args[0], self._full(self._params[args[1].strip("[]")]), wanted)
        elif name in ("ld", "st"):
            self._access(name, parts, args, wanted)
        elif name == "mma":
            self._mma(parts, args)
        elif name in ("ldmatrix", "stmatrix", "movmatrix"):
            self._matrices(name, parts, args)
        elif name == "cp":
            if parts[2] in ("ca", "cg"):  # others wait for copies, which are done at once here
                self._copy(args, wanted)
        elif name in ("shfl", "vote", "redux", "atom"):
            self._exchange(name, parts, args, wanted)
        elif name == "setp":
            self._set(args[0], self._compare(parts, args), wanted)
        elif name == "cvt":
            self._convert(parts, args, wanted)
        elif name == "mov" and args[0].startswith("{"):
            self._unpack(args, wanted, 64 if parts[-1] == "b64" else 32)
        elif name == "mov" and args[1].startswith("{"):
            pieces = _names(args[1])
            width = (64 if parts[-1] == "b64" else 32) // len(pieces)
            made = self._full(0)
            for i, piece in enumerate(pieces):
                made |= self._get(piece, width) << np.uint64(i * width)
            self._set(args[0], made, wanted)
        elif parts[-1] == "pred":
            given = [self._predicate(one) for one in args[1:]]
            made = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "mov": lambda a: a,
                    "not": np.logical_not}[name](*given)  # fmt: skip
            self._set(args[0], made, wanted)
        else:
            width = WIDTHS[re.sub(r"\D", "", parts[-1].split("x")[0])] if parts[-1] != "bf16" else 16
            width = 32 if parts[-1].endswith("x2") else width
            made = self._arithmetic(name, parts, args, width)
            wide = 64 if "wide" in parts and width == 32 else 32 if "wide" in parts else width
            self._set(args[0], made & MASKS[wide], wanted)

    def _exchange(self, name: str, parts: list[str], args: list[str], wanted: Bits) -> None:
        """Among the threads of a warp, or of a program."""
        if name == "atom":
            assert parts[-2:] in (["add", "u32"], ["add", "s32"])
            if "shared" in parts:
                self._shared.add(self._address(args[1]), self._get(args[2], 32), wanted)
            else:
                self._set(args[0], self._memory.add(self._address(args[1]), self._get(args[2], 32), wanted), wanted)
            return
        number = np.arange(self._threads)
        if name == "shfl":
            assert {"bfly", "idx", "up"} & set(parts)
            other = self._get(args[2]).astype(np.int64) % 32
            source = number ^ other if "bfly" in parts else number // 32 * 32 + other
            if "up" in parts:
                source = np.where(number % 32 >= other, number - other, number)
            made = self._get(args[1], 32)[source]
        elif name == "vote":
            assert "ballot" in parts
            each = self._predicate(args[1]).reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
            made = np.repeat(each.sum(1, dtype=np.uint64), 32)
        else:
            assert parts[-2] in ("min", "max", "add") and parts[-1] == "s32"
            each = signed(self._get(args[1], 32), 32).reshape(-1, 32)
            chosen = {"min": each.min, "max": each.max, "add": each.sum}[parts[-2]](1)
            made = np.repeat(chosen, 32).view(np.uint64) & MASKS[32]
        self._set(args[0].split("|")[0], made, wanted)

    def _unpack(self, args: list[str], wanted: Bits, width: int) -> None:
        pieces = _names(args[0])
        each, value = width // len(pieces), self._get(args[1], width)
        for i, piece in enumerate(pieces):
            if piece != "_":
                self._set(piece, (value >> np.uint64(i * each)) & MASKS[each], wanted)

    def _access(self, name: str, parts: list[str], args: list[str], wanted: Bits) -> None:
        memory = self._shared if "shared" in parts or "shared::cta" in parts else self._memory
        size = WIDTHS[re.sub(r"\D", "", parts[-1])] // 8
        place, value = (args[1], args[0]) if name == "ld" else (args[0], args[1])
        registers = _names(value)
        addresses = self._address(place)
        if name == "ld":
            found = memory.load(addresses, size * len(registers), wanted)
            for i, register in enumerate(registers):
                piece = found[:, i * size : (i + 1) * size]
                padded = np.zeros((self._threads, 8), np.uint8)
                padded[:, :size] = piece
                self._set(register, padded.view(np.uint64)[:, 0], wanted)
        else:
            pieces = [self._get(one, size * 8).view(np.uint8).reshape(-1, 8)[:, :size] for one in registers]
            memory.store(addresses, np.concatenate(pieces, 1), wanted)

    def _copy(self, args: list[str], wanted: Bits) -> None:
        """To shared memory, of the first bytes of a piece: the others become zero."""
        size, count = int(args[2], 0), self._get(args[3], 32) if len(args) > 3 else self._full(int(args[2], 0))
        found = self._memory.load(self._address(args[1]), size, wanted & (count > 0))
        found[np.arange(size) >= count.astype(np.int64)[:, None]] = 0
        self._shared.store(self._address(args[0]), found, wanted)

    def _matrices(self, name: str, parts: list[str], args: list[str]) -> None:
        """Of 8 x 8 numbers of 16 bits, between shared memory and registers. Eight threads have the addresses of a
        matrix's rows; a thread gets two numbers of a row, or of a column."""
        if name == "movmatrix":
            self._set(args[0], self._transposed(self._get(args[1], 32)), np.ones(self._threads, bool))
            return
        registers, place = (args[0], args[1]) if name == "ldmatrix" else (args[1], args[0])
        addresses, number, everyone = self._address(place), np.arange(self._threads), np.ones(self._threads, bool)
        own, pair = number % 32 // 4, number % 4 * 2
        for i, register in enumerate(_names(registers)):
            rows_of = number // 32 * 32 + 8 * i  # the thread that has the address of row 0
            made = self._full(0)
            for j in (0, 1):
                row, column = (pair + j, own) if "trans" in parts else (own, pair + j)
                at, shift = addresses[rows_of + row] + (2 * column).astype(np.uint64), np.uint64(16 * j)
                if name == "ldmatrix":
                    low, high = self._shared.load(at, 2, everyone).astype(np.uint64).T
                    made |= (low | high << np.uint64(8)) << shift
                else:
                    half_word = self._get(register, 32) >> shift
                    self._shared.store(at, half_word.view(np.uint8).reshape(-1, 8)[:, :2], everyone)
            if name == "ldmatrix":
                self._set(register, made, everyone)

    def _transposed(self, pairs: Bits) -> Bits:
        """8 x 8 numbers of 16 bits of each warp, of which a thread has two of a row."""
        number, made = np.arange(self._threads), self._full(0)
        for j in (0, 1):
            row, column = number % 4 * 2 + j, number % 32 // 4
            found = pairs[number // 32 * 32 + row * 4 + column // 2] >> (16 * (column % 2)).astype(np.uint64)
            made |= (found & MASKS[16]) << np.uint64(16 * j)
        return made

    def _mma(self, parts: list[str], args: list[str]) -> None:
        assert "m16n8k16" in parts
        kind = parts[-2]
        out, a, b, c = (_names(one) for one in args)
        warps, lane = self._threads // 32, np.arange(32)
        group, four = lane // 4, lane % 4
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        total = np.zeros((warps, 16, 8))
        for i, name in enumerate(a):
            bits = self._get(name, 32)
            for j in (0, 1):
                own = half((bits >> np.uint64(16 * j)) & MASKS[16], kind).reshape(warps, 32)
                left[:, group + 8 * (i % 2), 2 * four + j + 8 * (i // 2)] = own
        for i, name in enumerate(b):
            bits = self._get(name, 32)
            for j in (0, 1):
                own = half((bits >> np.uint64(16 * j)) & MASKS[16], kind).reshape(warps, 32)
                right[:, 2 * four + j + 8 * i, group] = own
        for i, name in enumerate(c):
            total[:, group + 8 * (i // 2), 2 * four + i % 2] = f32(self._get(name, 32)).reshape(warps, 32)
        total += left @ right
        for i, name in enumerate(out):
            made = total[:, group + 8 * (i // 2), 2 * four + i % 2].reshape(-1)
            self._set(name, of_f32(made), np.ones(self._threads, bool))

    def _compare(self, parts: list[str], args: list[str]) -> Bits:
        kind = parts[-1]
        if kind == "f32":
            a, b = (f32(self._get(one, 32)) for one in args[1:3])
        else:
            width = WIDTHS[kind[1:]]
            a, b = (self._get(one, width) for one in args[1:3])
            if kind[0] == "s":
                a, b = signed(a, width), signed(b, width)
        return {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                "ge": np.greater_equal}[parts[1]](a, b)  # fmt: skip

    def _convert(self, parts: list[str], args: list[str], wanted: Bits) -> None:
        to, of = parts[-2:]
        if of in FLOAT8:
            bits = self._get(args[1], 16)
            each = [torch.from_numpy(((bits >> np.uint64(8 * i)) & MASKS[8]).astype(np.uint8)) for i in (0, 1)]
            halves = [of_half(one.view(FLOAT8[of]).double().numpy(), "f16") for one in each]
            return self._set(args[0], halves[0] | halves[1] << np.uint64(16), wanted)
        if to.endswith("x2"):
            high, low = (of_half(f32(self._get(one, 32)), to[:-2]) for one in args[1:3])
            return self._set(args[0], low | high << np.uint64(16), wanted)
        floats: dict[str, Callable[[Bits], np.ndarray]] = {
            "f32": f32, "bf16": lambda bits: half(bits, "bf16"), "f16": lambda bits: half(bits, "f16")
        }  # fmt: skip
        width = 16 if of == "bf16" else WIDTHS[of[1:]]
        bits = self._get(args[1], width)
        number = floats[of](bits) if of in floats else signed(bits, width) if of[0] == "s" else bits
        if to == "f32":
            made = of_f32(np.asarray(number, np.float64))
        elif to in floats:
            made = of_half(number, to)
        else:
            assert of not in floats
            made = np.asarray(number).astype(np.int64).view(np.uint64) & MASKS[WIDTHS[to[1:]]]
        return self._set(args[0], made, wanted)

    def _arithmetic(self, name: str, parts: list[str], args: list[str], width: int) -> Bits:
        kind = parts[-1]
        if name == "selp":
            return np.where(self._registers[args[3]], self._get(args[1], width), self._get(args[2], width))
        if kind in ("bf16x2", "f16x2"):
            halves = []
            for i in (0, 1):
                given = [half((self._get(one, 32) >> np.uint64(16 * i)) & MASKS[16], kind[:-2]) for one in args[1:]]
                halves.append(of_half(floats(name, given), kind[:-2]))
            return halves[0] | halves[1] << np.uint64(16)
        if kind in ("f32", "bf16", "f16"):
            if kind == "f32":
                return of_f32(floats(name, [f32(self._get(one, 32)).astype(np.float64) for one in args[1:]]))
            return of_half(floats(name, [half(self._get(one, 16), kind) for one in args[1:]]), kind)
        given = [self._get(one, width) for one in args[1:] if one not in self._registers or
                 self._registers[one].dtype != bool]  # fmt: skip
        if kind[0] == "s":
            numbers = [signed(one, width) for one in given]
            if "wide" in parts and name == "mad":
                numbers[2] = signed(self._get(args[3], 2 * width), 2 * width)
        else:
            numbers = [one.astype(np.int64) for one in given]
            if "wide" in parts and name == "mad":
                numbers[2] = self._get(args[3], 2 * width).astype(np.int64)
        if name in BITWISE:
            return BITWISE[name](*given)
        if name == "bfe":
            return extract(numbers[0], numbers[1], int(numbers[2][0]), kind[0] == "s")
        if "hi" in parts:
            assert name == "mul" and width <= 32
            if kind[0] != "s":
                return given[0] * given[1] >> np.uint64(width)
            return (numbers[0] * numbers[1] >> width).view(np.uint64)
        with np.errstate(over="ignore"):
            return integers(name, numbers, width).astype(np.int64).view(np.uint64)


def _names(text: str) -> list[str]:
    return [one.strip() for one in text.strip("{} ").split(",")]
