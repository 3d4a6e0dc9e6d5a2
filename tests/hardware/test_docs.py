"""docs/devices.md: its examples of -dev are accepted, its options and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import moeedge
from moeedge.hardware.devices import EMULATED_RATIO
from moeedge.hardware.spec import DeviceSpec
from moeedge.scheduler.sizing import default_reserve
from moeedge.units import parse_size
from tests.support.commands import option_names

TEXT = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")


def test_devices_are_accepted() -> None:
    named = re.findall(r"-dev ([^\s`]+)", TEXT) + re.findall(r"^\| `([^`]+)` \|.*\|.*\|$", TEXT, re.MULTILINE)
    named = [name for name in named if not name.endswith(".py") and name != "-dev"]
    kinds = {DeviceSpec.parse(name).kind for name in named}
    assert kinds == {"auto", "none", "name", "emulated", "rpc"}


def test_options_exist() -> None:
    known = option_names()
    pip = {"--no-cache-dir", "--force-reinstall"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - pip <= known


def test_files_exist() -> None:
    folder = Path(moeedge.__file__).parent / "hardware"
    named = set(re.findall(r"`(\w+\.py)`", TEXT))
    assert named
    assert all((folder / name).is_file() for name in named)


def test_figures() -> None:
    assert f"{EMULATED_RATIO:.0%}".replace("%", " %") in " ".join(TEXT.split())
    assert default_reserve(16 * 2**30) == 16 * 2**30 // 32
    assert default_reserve(0) == parse_size("256MiB")
    assert default_reserve(2**40) == parse_size("1GiB")
