"""What -dev may say, and sizes and rates as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.errors import DeviceError
from moeedge.hardware.spec import DeviceSpec
from moeedge.units import format_bytes, format_rate, parse_rate, parse_size

KNOWN = {
    "auto": DeviceSpec("auto"),
    "none": DeviceSpec("none"),
    "emulated": DeviceSpec("emulated"),
    "emulated:link=25GB/s": DeviceSpec("emulated", link_bytes_per_s=25_000_000_000),
    "emulated:threads=2": DeviceSpec("emulated", threads=2),
    "emulated:latency=20us": DeviceSpec("emulated", latency_us=20.0),
    "emulated:latency=1.5ms,threads=1": DeviceSpec("emulated", latency_us=1500.0, threads=1),
    "emulated:threads=1,link=512MiB/s": DeviceSpec("emulated", threads=1, link_bytes_per_s=512 * 2**20),
    "emulated: link=1.5 GB/s": DeviceSpec("emulated", link_bytes_per_s=1_500_000_000),
    "CUDA0": DeviceSpec("name", name="CUDA0"),
    " CUDA0 ": DeviceSpec("name", name="CUDA0"),
    "rpc://127.0.0.1:50052": DeviceSpec("rpc", endpoint="127.0.0.1:50052"),
    "rpc://gpu-box:1/": DeviceSpec("rpc", endpoint="gpu-box:1"),
}
MALFORMED = {  # and a part of what is said of it
    "": "empty", "emulated:": "option", "emulated:speed=3": '"speed=3"', "emulated:link=25GB": '"25GB"',
    "emulated:link=0GB/s": '"0GB/s"', "emulated:link=-1GB/s": '"-1GB/s"', "emulated:link=nanGB/s": '"nanGB/s"',
    "emulated:link=1GB/s,link=2GB/s": "twice", "emulated:threads=0": '"0" threads', "emulated:threads=²": "threads",
    "emulated:threads=1000000": "threads", "emulated:latency=20": 'latency "20"',
    "emulated:latency=-1us": 'latency "-1us"', "rpc://": "not HOST:PORT", "rpc://host": "not HOST:PORT",
    "rpc://:50052": "not HOST:PORT", "rpc://host:0": "port", "rpc://host:65536": '"65536"',
    "rpc://host:port": '"port"', "rpc://[::1]:50052": "IPv4", "rpc://a b:50052": "IPv4",
}  # fmt: skip
SIZES = {"0": 0, "123": 123, "123B": 123, "6GB": 6_000_000_000, "6 gb": 6_000_000_000, "6GiB": 6 * 2**30}
SIZES |= {"6G": 6 * 2**30, "1.5MiB": 3 * 2**19, ".5K": 512, "2TB": 2_000_000_000_000}


def test_known_forms() -> None:
    assert {text: DeviceSpec.parse(text) for text in KNOWN} == KNOWN


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_specs_raise_device_errors(text: str) -> None:
    with pytest.raises(DeviceError, match=MALFORMED[text]) as caught:
        DeviceSpec.parse(text)
    assert caught.value.hint


@given(st.text())
def test_any_text_is_a_spec_or_a_device_error(text: str) -> None:
    try:
        spec = DeviceSpec.parse(text)
    except DeviceError:
        return
    assert spec.kind in ("auto", "none", "emulated", "name", "rpc")


def test_sizes() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e3", "1 2GB", "1XB", "inf", "nan", "1GB/s", "1" * 400])
def test_malformed_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.integers(0, 2**50), st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_sizes_and_rates_agree(amount: int, unit: str) -> None:
    size = parse_size(f"{amount}{unit}")
    assert size >= amount
    if size:
        assert parse_rate(f"{amount}{unit}/s") == size


def test_formatted_sizes() -> None:
    sizes = {0: "0 KiB", 1000: "1000 bytes", 2**20 - 2**9: "1024 KiB", 5 * 2**20: "5 MiB", 3 * 2**29: "1.5 GiB"}
    assert {n: format_bytes(n) for n in sizes} == sizes
    rates = {25e9: "25 GB/s", 1.5e9: "1.5 GB/s", 40e6: "40 MB/s", 2e3: "2 kB/s", 7: "7 B/s"}
    assert {rate: format_rate(rate) for rate in rates} == rates
