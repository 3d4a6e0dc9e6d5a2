"""The header of a GGUF file as values that can be changed one by one, and random changes of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by gguf_type
STRING, ARRAY = 8, 9
EXTREMES = (0, 1, 2, 3, 7, 127, 255, 513, 65_537, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-38, 1e30, float("inf"), float("nan"))
NAMES = (b"", b"general.architecture", b"llama", b"gpt-oss", b"output.weight", b"\xff\xfe", b"\x1b[31m\n")
NAMES += (b"x" * 70_000,)
TYPES = (*range(46), 255, 2**31 - 1)  # ggml's, and none of its


@dataclass
class Pair:
    """A key and its value: a number, text, or numbers or texts of one type."""

    name: bytes
    type: int
    value: object
    element: int = 0  # type of an array's elements


@dataclass
class Tensor:
    name: bytes
    shape: list[int]
    type: int
    offset: int


@dataclass
class Header:
    """All of a file before its data. n_pairs, n_tensors: what the file says, where that is not the truth."""

    version: int
    pairs: list[Pair]
    tensors: list[Tensor]
    size: int = 0  # bytes of the header as it was read
    n_pairs: int | None = None
    n_tensors: int | None = None
    patches: list[tuple[float, int]] = field(default_factory=list)  # place, as a share of the header, and byte


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def numbers(self, form: str, n: int = 1) -> tuple[int, ...]:
        form = f"<{n}{form}"
        self.at += struct.calcsize(form)
        return struct.unpack_from(form, self.data, self.at - struct.calcsize(form))

    def text(self) -> bytes:
        (n,) = self.numbers("Q")
        self.at += n
        return self.data[self.at - n : self.at]


def parse(data: bytes) -> Header:
    """The header of a sound file."""
    reader = _Reader(data)
    reader.at = 4
    (version,) = reader.numbers("I")
    n_tensors, n_pairs = reader.numbers("Q", 2)
    header = Header(version, [], [])
    for _ in range(n_pairs):
        key, (kind,) = reader.text(), reader.numbers("I")
        if kind == ARRAY:
            (element,), (n,) = reader.numbers("I"), reader.numbers("Q")
            values = [reader.text() for _ in range(n)] if element == STRING else [*reader.numbers(SCALARS[element], n)]
            header.pairs.append(Pair(key, kind, values, element))
        else:
            header.pairs.append(Pair(key, kind, reader.text() if kind == STRING else reader.numbers(SCALARS[kind])[0]))
    for _ in range(n_tensors):
        name, (n_dims,) = reader.text(), reader.numbers("I")
        shape, (kind,), (offset,) = [*reader.numbers("Q", n_dims)], reader.numbers("I"), reader.numbers("Q")
        header.tensors.append(Tensor(name, shape, kind, offset))
    header.size = reader.at
    return header


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _scalar(kind: int, value: object) -> bytes:
    form = SCALARS.get(kind, "I")
    if form in "fd?":
        return struct.pack(f"<{form}", value)
    n_bytes = struct.calcsize(form)
    return (int(value) % (1 << (8 * n_bytes))).to_bytes(n_bytes, "little")  # type: ignore[call-overload, no-any-return]


def written(header: Header) -> bytes:
    """The bytes of the header."""
    out = [b"GGUF", struct.pack("<I", header.version)]
    counts = ((header.n_tensors, header.tensors), (header.n_pairs, header.pairs))
    out += [struct.pack("<Q", len(there) if said is None else said) for said, there in counts]
    for pair in header.pairs:
        out += [_text(pair.name), struct.pack("<I", pair.type)]
        if pair.type == ARRAY and isinstance(pair.value, list):
            out.append(struct.pack("<IQ", pair.element, len(pair.value)))
            out += [_text(each) if isinstance(each, bytes) else _scalar(pair.element, each) for each in pair.value]
        else:
            out.append(_text(pair.value) if isinstance(pair.value, bytes) else _scalar(pair.type, pair.value))
    for tensor in header.tensors:
        shape = b"".join(struct.pack("<Q", n % (1 << 64)) for n in tensor.shape)
        out += [_text(tensor.name), struct.pack("<I", len(tensor.shape)), shape]
        out.append(struct.pack("<IQ", tensor.type % (1 << 32), tensor.offset % (1 << 64)))
    data = bytearray(b"".join(out))
    for share, byte in header.patches:
        data[int(share * (len(data) - 1))] = byte
    return bytes(data)


def _number(rng: Random, now: object) -> object:
    near = [int(now) + step for step in (-1, 1)] if isinstance(now, int) else []
    return rng.choice([*EXTREMES, *near])


def _change_value(rng: Random, header: Header) -> None:
    pair = rng.choice(header.pairs)
    value = pair.value
    if isinstance(value, bytes):
        pair.value = rng.choice([*NAMES, value[:-1], value * 2])
    elif isinstance(value, list):
        _change_array(rng, pair, value)
    elif pair.type in (6, 12):
        pair.value = rng.choice(FLOATS)
    else:
        pair.value = bool(rng.random() < 0.5) if pair.type == 7 else _number(rng, value)


def _change_array(rng: Random, pair: Pair, values: list[object]) -> None:
    way = rng.randrange(5)
    if way == 0:
        pair.value = values[: rng.choice((0, 1, len(values) // 2))]
    elif way == 1:
        pair.value = values + values[: rng.choice((1, 7))]
    elif way == 2 and values:
        n = rng.randrange(len(values))
        new: object = rng.choice(NAMES) if isinstance(values[n], bytes) else _number(rng, 0)
        if pair.element in (6, 7, 12):
            new = rng.choice(FLOATS) if pair.element != 7 else True
        pair.value = [*values[:n], new, *values[n + 1 :]]
    elif way == 3:
        pair.element = rng.choice((*SCALARS, STRING, ARRAY, 99))
        pair.value = [b"a" if pair.element == STRING else 1.0 if pair.element in (6, 12) else 1 for _ in values[:9]]
    else:
        pair.type, pair.value = 4, len(values)


def _change_list(rng: Random, header: Header) -> None:
    """One entry less, one twice, or one with another name."""
    entries: list[Pair] | list[Tensor] = rng.choice((header.pairs, header.tensors))
    n, way = rng.randrange(len(entries)), rng.randrange(3)
    if way == 0:
        del entries[n]
    elif way == 1:
        entries.append(entries[n])  # type: ignore[arg-type]
    else:
        entries[n].name = rng.choice([*NAMES, rng.choice(entries).name])


def _change_type(rng: Random, header: Header) -> None:
    """The same key with a number of another type, or an array of numbers."""
    pair, number = rng.choice(header.pairs), rng.choice(EXTREMES)
    pair.type, pair.element = rng.choice((*SCALARS, STRING, ARRAY)), 5
    pair.value = {STRING: b"text", ARRAY: [number] * 3, 6: 1.5, 12: 1.5, 7: True}.get(pair.type, number)


def _change_tensor(rng: Random, header: Header) -> None:
    tensor, way = rng.choice(header.tensors), rng.randrange(4)
    if way == 0 and tensor.shape:
        at = rng.randrange(len(tensor.shape))
        tensor.shape[at] = int(_number(rng, tensor.shape[at]))  # type: ignore[call-overload]
    elif way == 1:
        tensor.shape = rng.choice(([], [1], tensor.shape[::-1], [*tensor.shape, 2], [1] * 9))
    elif way == 2:
        tensor.type = rng.choice(TYPES)
    else:
        tensor.offset = rng.choice((0, 1, 32, tensor.offset + 32, tensor.offset + 1, 2**40, 2**63, 2**64 - 1))


def _change_counts(rng: Random, header: Header) -> None:
    which = rng.choice(("n_pairs", "n_tensors", "version"))
    now = len(header.pairs) if which == "n_pairs" else len(header.tensors) if which == "n_tensors" else header.version
    number = int(_number(rng, now))  # type: ignore[call-overload]
    setattr(header, which, number % (1 << (32 if which == "version" else 64)))


def _change_bytes(rng: Random, header: Header) -> None:
    header.patches += [(rng.random(), rng.randrange(256)) for _ in range(rng.choice((1, 2, 8, 64)))]


CHANGES = (
    *(_change_value, _change_value, _change_list, _change_list),
    *(_change_type, _change_tensor, _change_counts, _change_bytes),
)


def mutated(rng: Random, data: bytes) -> bytes:
    """A file with one to three changes in its header, of the same length after it; a tenth is cut off somewhere."""
    header = parse(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if header.pairs and header.tensors:
            rng.choice(CHANGES)(rng, header)
    start = -(-header.size // 32) * 32
    new = written(header)
    changed = new + bytes(-len(new) % 32) + data[start:]
    return changed[: int(rng.random() * len(changed))] if rng.random() < 0.1 else changed


def benign(rng: Random, data: bytes) -> bytes:
    """The same model: further keys of every type, other texts about it, its keys and tensors in another order, another
    alignment, bytes after its end."""
    header = parse(data)
    for n in range(rng.randrange(4)):
        kind = rng.choice((*SCALARS, STRING, ARRAY))
        texts: dict[int, object] = {STRING: b"text" * rng.randrange(99), ARRAY: [rng.randrange(9)] * rng.randrange(9)}
        value = texts | {6: 1.5, 12: 2.5, 7: True}
        header.pairs.append(Pair(b"own.%d.%d" % (n, rng.randrange(99)), kind, value.get(kind, rng.randrange(100)), 5))
    for name in (b"general.name", b"general.description", b"general.license"):
        header.pairs = [pair for pair in header.pairs if pair.name != name]
        if rng.random() < 0.7:
            header.pairs.append(Pair(name, STRING, rng.randbytes(rng.randrange(60)).hex().encode()))
    body = _laid_out(rng, header, data[-(-header.size // 32) * 32 :])
    if rng.random() < 0.5:
        rng.shuffle(header.pairs)
    new = written(header)
    alignment = next((int(pair.value) for pair in header.pairs if pair.name == b"general.alignment"), 32)  # type: ignore[call-overload]
    return new + bytes(-len(new) % alignment) + body + rng.randbytes(rng.choice((0, 0, 1, 4096)))


def _laid_out(rng: Random, header: Header, body: bytes) -> bytes:
    """The tensors' data in a new order and alignment, which the header then names."""
    ends = [*sorted(tensor.offset for tensor in header.tensors)[1:], len(body)]
    by_offset = sorted(header.tensors, key=lambda tensor: tensor.offset)
    parts = {tensor.name: body[tensor.offset : end] for tensor, end in zip(by_offset, ends, strict=True)}
    alignment = rng.choice((32, 32, 64, 256, 4096))
    if alignment != 32:
        header.pairs = [pair for pair in header.pairs if pair.name != b"general.alignment"]
        header.pairs.append(Pair(b"general.alignment", 4, alignment))
    if rng.random() < 0.5:
        rng.shuffle(header.tensors)
    new = bytearray()
    for tensor in header.tensors:
        tensor.offset = len(new)
        new += parts[tensor.name]
        new += bytes(-len(new) % alignment)
    return bytes(new)
