"""The native library: attaches our ggml backend to llama.cpp, reads its routing sensor, drives its expert cache."""

from __future__ import annotations

from moeedge.native.abi import CaptureFlags, OffloadScope
from moeedge.native.backends import LoadedBackend, attach, load_backend
from moeedge.native.capture import CAPTURED_TOKENS, ActivationCapture, Activations, Block
from moeedge.native.devices import Device, devices
from moeedge.native.library import keep_activations_near, library_path, load, newest_instance
from moeedge.native.sensor import Frame, Sensor, SensorStats

__all__ = [
    "CAPTURED_TOKENS",
    "ActivationCapture",
    "Activations",
    "Block",
    "CaptureFlags",
    "Device",
    "Frame",
    "LoadedBackend",
    "OffloadScope",
    "Sensor",
    "SensorStats",
    "attach",
    "devices",
    "keep_activations_near",
    "library_path",
    "load",
    "load_backend",
    "newest_instance",
]
