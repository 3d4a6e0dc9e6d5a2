"""Sizes and rates as people write them: 6GB, 512MiB, 25GB/s."""

from __future__ import annotations

import math
import re
from contextlib import suppress

_FACTORS = {"": 1, "b": 1} | {
    unit: base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in ((prefix, 1024), (prefix + "b", 1000), (prefix + "ib", 1024))
}
# What CUDA has less than a card's nominal size: programs report 7.76 GiB of 8 (RTX 3070; sshan-zhao/GASDA issue 19),
# 9.78 of 10 (RTX 3080; zai-org/CogVideo issue 34), 11.75 of 12 (RTX 3060; Kunhao-Liu/StyleGaussian issue 12)
_DRIVER_BYTES = 256 * 2**20
_SIZE = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*$")


def parse_size(text: str) -> int:
    """Bytes of a size: KB to TB are powers of 1,000; KiB to TiB and K, M, G, T of 1,024. Raises ValueError."""
    match = _SIZE.match(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    size = float(match[1]) * factor if match and factor else math.nan
    if not math.isfinite(size):
        examples = "6GB (powers of 1,000) or 512MiB (powers of 1,024)"
        raise ValueError(f'"{text}" is not a size; write for instance {examples}')
    return round(size)


def parse_gpu_size(text: str) -> int:
    """The bytes that programs can use of a GPU: 12 GiB less the driver's part for "12GB". Raises ValueError."""
    size, match = parse_size(text), _SIZE.match(text)
    if match is None or match[2].lower() != "gb" or size < 10**9:
        return size
    return round(float(match[1]) * 2**30) - _DRIVER_BYTES


def parse_rate(text: str) -> int:
    """Parses a size followed by "/s" to bytes per second. Raises ValueError."""
    amount, _, second = text.rpartition("/")
    with suppress(ValueError):
        if second.strip() == "s" and (rate := parse_size(amount)) > 0:
            return rate
    raise ValueError(f'"{text}" is not a rate; write for instance 25GB/s')


def format_bytes(n_bytes: int) -> str:
    """Formats a size in powers of 1,024: "512 MiB", "5.9 GiB"."""
    if 0 < n_bytes < 2**10:
        return f"{n_bytes} byte{'s' if n_bytes > 1 else ''}"
    large = _in_units(n_bytes, ".1f", {"GiB": 2**30}) or _in_units(n_bytes, ".0f", {"MiB": 2**20})
    return large or f"{n_bytes / 2**10:.0f} KiB"


def _in_units(n: float, form: str, units: dict[str, float]) -> str:
    """The number in the first unit that it reaches; empty where it reaches none."""
    return next((f"{n / factor:{form}} {unit}" for unit, factor in units.items() if n >= factor), "")


def format_rate(bytes_per_s: float) -> str:
    """Formats a rate in powers of 1,000, as links are specified: "25 GB/s"."""
    return _in_units(bytes_per_s, ".3g", {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}) or f"{bytes_per_s:.3g} B/s"


def format_weights(n: int) -> str:
    """A number of weights as models are named: "30.53 billion"."""
    return _in_units(n, ".4g", {"trillion": 1e12, "billion": 1e9, "million": 1e6}) or f"{n:,}"


def format_count(n: int) -> str:
    """A number of parameters as llama.cpp writes it: "42.51 M", "30.53 B"."""
    return _in_units(n, ".2f", {"B": 1e9, "M": 1e6, "K": 1e3}) or str(n)


# control characters (C0 without tab and newline, DEL, C1) as visible pictures: files do not drive the terminal
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """`text` with control characters replaced by pictures of them, tabs and newlines kept."""
    return text.translate(_VISIBLE)
