"""The native library seen from Python: attach our ggml backend to llama.cpp, read what its sensor saw."""

from __future__ import annotations

from moeedge.native.capture import WATCHED_TOKENS, Block, Capture, Captured, Kept
from moeedge.native.claims import Claims
from moeedge.native.device_list import Device, devices
from moeedge.native.library import attach, library_path, load, newest_instance
from moeedge.native.sensor import Frame, Sensor, SensorStats

__all__ = [
    "WATCHED_TOKENS",
    "Block",
    "Capture",
    "Captured",
    "Claims",
    "Device",
    "Frame",
    "Kept",
    "Sensor",
    "SensorStats",
    "attach",
    "devices",
    "library_path",
    "load",
    "newest_instance",
]
