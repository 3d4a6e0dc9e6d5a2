"""The native library: attaches our ggml backend to llama.cpp, reads its routing sensor, drives its expert cache."""

from __future__ import annotations

from moeedge.native.abi import CaptureFlags as CaptureFlags
from moeedge.native.abi import OffloadScope as OffloadScope
from moeedge.native.backends import Device as Device
from moeedge.native.backends import attach as attach
from moeedge.native.backends import devices as devices
from moeedge.native.backends import load_backend as load_backend
from moeedge.native.library import library_path as library_path
from moeedge.native.library import load as load
from moeedge.native.sensor import CAPTURED_TOKENS as CAPTURED_TOKENS
from moeedge.native.sensor import ActivationCapture as ActivationCapture
from moeedge.native.sensor import Block as Block
from moeedge.native.sensor import Frame as Frame
from moeedge.native.sensor import Sensor as Sensor
