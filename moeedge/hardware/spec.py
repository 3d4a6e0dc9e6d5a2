"""The value of -dev as the user wrote it; parsing does not touch llama.cpp."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from moeedge.errors import DeviceError, require
from moeedge.units import parse_rate

SpecKind = Literal["auto", "none", "emulated", "name", "rpc"]
EMULATED = "emulated"
RPC_SCHEME = "rpc://"
MAX_N_THREADS = 512  # GGML_MAX_N_THREADS; ggml crashes beyond it
_EMULATED_FORM = "Write emulated, or emulated: and any of link=25GB/s, latency=20us, threads=2, separated by commas."


@dataclass(frozen=True)
class DeviceSpec:
    """A device as requested with -dev; made by `parse`."""

    kind: SpecKind
    name: str = ""  # of a device that llama.cpp lists; kind "name" only
    link_bytes_per_s: int = 0  # of the emulated device; 0: not paced
    latency_us: float = 0.0  # added to each transfer of the emulated device
    threads: int = 0  # of the emulated device; 0: half the physical cores
    endpoint: str = ""  # HOST:PORT of a worker; kind "rpc" only

    @classmethod
    def parse(cls, text: str) -> DeviceSpec:
        """Parses auto, none, emulated[:link=RATE][,latency=TIME][,threads=N], rpc://HOST:PORT or a device's name.

        Raises DeviceError for a malformed value; `devices.resolve` checks whether a name exists.
        """
        text = text.strip()
        if text in ("auto", "none"):
            return cls("auto" if text == "auto" else "none")
        if text == EMULATED or text.startswith(f"{EMULATED}:"):
            return _parse_emulated(text)
        if not text:
            raise DeviceError("The device name is empty.", "Write auto, none, emulated, rpc://HOST:PORT or a name.")
        if not text.startswith(RPC_SCHEME):
            return cls("name", name=text)
        try:
            host, port = parse_host_port(text.removeprefix(RPC_SCHEME).rstrip("/"))
            require(port, "it lacks a port")
        except ValueError as error:
            hint = "Write rpc://HOST:PORT, for instance rpc://127.0.0.1:50052."
            raise DeviceError(f'"{text}" is not the address of a worker: {error}.', hint) from error
        return cls("rpc", endpoint=f"{host}:{port}")


def _parse_emulated(text: str) -> DeviceSpec:
    link, threads, latency_us, seen = 0, 0, 0.0, set()
    _, colon, options = text.partition(":")
    for option in options.split(",") if colon else []:
        key, _, value = option.strip().partition("=")
        if key in seen:
            raise DeviceError(f'The emulated device has "{key}" twice.', _EMULATED_FORM)
        seen.add(key)
        if key == "link":
            try:
                link = parse_rate(value)
            except ValueError as error:
                raise DeviceError(f"Invalid link speed of the emulated device: {error}.", _EMULATED_FORM) from error
        elif key == "latency":
            latency_us = _parse_latency(value)
        elif key == "threads":
            if not (value.isascii() and value.isdigit() and 1 <= int(value) <= MAX_N_THREADS):
                hint = f"Give a number from 1 to {MAX_N_THREADS}."
                raise DeviceError(f'The emulated device cannot have "{value}" threads.', hint)
            threads = int(value)
        else:
            raise DeviceError(f'The emulated device has no option "{option.strip()}".', _EMULATED_FORM)
    return DeviceSpec("emulated", link_bytes_per_s=link, latency_us=latency_us, threads=threads)


def _parse_latency(text: str) -> float:
    """Returns microseconds from text such as "20us" or "1.5ms"."""
    for unit, factor in (("us", 1.0), ("ms", 1e3)):
        number = text.removesuffix(unit)
        if number != text and number.isascii() and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    raise DeviceError(f'The emulated device cannot have the latency "{text}".', "Write it like 20us or 1ms.")


def parse_host_port(text: str) -> tuple[str, int]:
    """Splits HOST:PORT; the host is an IPv4 address or a name, as llama.cpp's RPC has no IPv6. Raises ValueError."""
    host, _, port = text.rpartition(":")
    require(host, "it is not HOST:PORT")
    require(not re.search(r"[:/\s]", host), f'"{host}" is neither an IPv4 address nor a host name')
    require(port.isascii() and port.isdigit() and int(port) <= 65535, f'"{port}" is not a port')
    return host, int(port)
