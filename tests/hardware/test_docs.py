"""docs/devices.md: its examples of -dev are accepted, its options, files, release and figures are those of the code."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import moeedge
from moeedge import native
from moeedge.hardware.devices import EMULATED_RATIO
from moeedge.hardware.spec import DeviceSpec
from moeedge.native.backends import LLAMA_CPP_RELEASE
from tests.support.commands import option_names

TEXT = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")


def test_devices_are_accepted() -> None:
    named = re.findall(r"-dev ([^\s`]+)", TEXT) + re.findall(r"^\| `([^`]+)` \|.*\|.*\|$", TEXT, re.MULTILINE)
    kinds = {DeviceSpec.parse(name).kind for name in named if not name.endswith(".py") and name != "-dev"}
    assert kinds == {"auto", "none", "name", "emulated", "rpc"}


def test_options_and_files_exist() -> None:
    of_others = {"--no-cache-dir", "--force-reinstall", "--tags"}  # pip, git
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - of_others <= option_names()
    package = Path(moeedge.__file__).parent
    named = set(re.findall(r"`([\w/]+\.py)`", TEXT))
    assert named
    assert all((package / name).is_file() or (package / "hardware" / name).is_file() for name in named)


def test_release_and_figures() -> None:
    assert f"llama-cpp-python {version('llama-cpp-python')} that is build {LLAMA_CPP_RELEASE}, commit 0c1e57098" in TEXT
    assert f"/{LLAMA_CPP_RELEASE}/llama-{LLAMA_CPP_RELEASE}-bin-ubuntu-vulkan-x64.tar.gz" in TEXT
    assert f"ggml {native.load().moeedge_ggml_version().decode()}" in TEXT
    assert f"{EMULATED_RATIO:.0%}".replace("%", " %") in " ".join(TEXT.split())
