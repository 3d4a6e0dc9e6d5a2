"""The native library seen from Python: attach our ggml backend to llama.cpp, read what its sensor saw."""

from __future__ import annotations

from moeedge.native.claims import Claims
from moeedge.native.device_list import Device, devices
from moeedge.native.library import attach, library_path, load
from moeedge.native.sensor import Frame, Sensor, SensorStats

__all__ = ["Claims", "Device", "Frame", "Sensor", "SensorStats", "attach", "devices", "library_path", "load"]
