"""Prebuilt ggml backends: which files are loaded, and what is said about the others; toy backends in C."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from moeedge import native
from moeedge.errors import BackendFileError
from moeedge.experts import Residency
from moeedge.native import abi, backends
from tests.native.conftest import ROOT, printed, run_python
from tests.support.commands import refused

_DEVICES = ("-m", "moeedge", "devices", "-o", "json")
SOURCE = Path(__file__).with_name("toy_backend.c")
HEADERS = sorted((ROOT / "moeedge/native/include").glob("*.h"))
VULKAN = os.environ.get("MOEEDGE_VULKAN_BACKEND", "")

Compile = Callable[..., Path]


@pytest.fixture
def compile_toy(tmp_path: Path) -> Compile:
    """Compiles the toy backend: `NAME.so` in a folder of its own, from macros and linker options."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")

    def compile_toy(name: str, *options: str, entry: str = "ggml_backend_init", **macros: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        file = folder / f"{name}.so"
        defined = {"ENTRY": entry} | macros if entry else macros
        flags = [f"-D{key}={value}" for key, value in defined.items()]
        subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", str(file), str(SOURCE), *options], check=True)
        return file

    return compile_toy


@pytest.fixture
def library_named(tmp_path: Path) -> Callable[[str], str]:
    """Makes an empty library with that soname, and returns its path for the linker."""

    def library_named(soname: str) -> str:
        file = tmp_path / "empty.so"
        command = ["cc", "-shared", f"-Wl,-soname,{soname}", "-o", str(file), "-x", "c", "-"]
        subprocess.run(command, input=b"int empty;", check=True)
        return str(file)

    return library_named


def _devices(*arguments: str, **environment: str) -> dict[str, Any]:
    """The rows of `moeedge devices ARGUMENTS` in a process of its own: what a process has registered stays."""
    rows = json.loads(printed(*_DEVICES, *arguments, **environment))
    return {row["name"]: row for row in rows}


def _refusal(file: Path) -> BackendFileError:
    before = [device.name for device in native.devices()]
    with pytest.raises(BackendFileError) as caught:
        native.load_backend(file)
    assert [device.name for device in native.devices()] == before
    assert caught.value.exit_code == 2
    assert str(file) in caught.value.message
    assert caught.value.hint
    return caught.value


def test_both_kinds_of_library_are_loaded(compile_toy: Compile) -> None:
    """With ggml_backend_init and with ggml_backend_NAME_reg alone, by option and environment; ours does not matter."""
    by_init = compile_toy("first", NAME='"First"')
    by_registration = compile_toy("second", entry="ggml_backend_second_reg", NAME='"Second"', HOST_POINTER="true")
    by_init.with_name(f"libggml-base.so.{native.load().moeedge_ggml_version().decode()}").touch()
    named = os.pathsep.join([str(native.library_path()), str(by_init)])
    found = _devices("--backend", str(by_registration), "--backend", str(by_registration), GGML_BACKEND_PATH=named)
    assert list(found)[:3] == ["CPU", "First0", "Second0"]
    assert [found[name]["file"] for name in ("CPU", "First0", "Second0")] == [None, str(by_init), str(by_registration)]
    assert found["First0"]["usable"] and found["Second0"]["usable"]
    assert "auto does not choose it" not in found["First0"]["remark"]
    assert "auto does not choose it" in found["Second0"]["remark"]  # as on Apple's machines
    assert ["ggml's version" in found[name]["remark"] for name in ("First0", "Second0")] == [False, True]


def test_a_loaded_backend_is_named_by_the_function(compile_toy: Compile) -> None:
    file = compile_toy("toy", N_DEVICES=1)
    script = (
        "import sys\n"
        "from moeedge import native\n"
        "found = [native.load_backend(sys.argv[1]) for _ in range(2)]\n"
        "assert found[0] is found[1]\n"
        "print(found[0].name, found[0].n_devices, [device.name for device in native.devices()])\n"
    )
    assert printed("-c", script, file) == "Toy 1 ['CPU', 'Toy0']\n"


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in _refusal(tmp_path / "absent.so").message
    assert "directory" in _refusal(tmp_path).message
    contents = {
        "empty": b"",
        "text": b"a text that is somewhat longer than the header of an ELF file, as most texts are.",
        "xz": b"\xfd7zXZ" + bytes(100),
        "gzip": b"\x1f\x8b" + bytes(100),
        "elf": b"\x7fELF\x02\x01" + bytes(100),
        "mach-o": b"\xcf\xfa\xed\xfe" + bytes(100),
    }
    for name, content in contents.items():
        file = tmp_path / f"{name}.so"
        file.write_bytes(content)
        _refusal(file)


def test_damaged_libraries(compile_toy: Compile) -> None:
    """Cut at any length, or for another processor: found before the file is loaded."""
    file = compile_toy("whole")
    whole = file.read_bytes()
    for n_bytes in (32, 64, 1000, len(whole) // 2, len(whole) - 64):
        file.write_bytes(whole[:n_bytes])
        assert "complete" in (message := _refusal(file).message) or "not a shared library" in message
    file.write_bytes(whole[:18] + b"\x02\x00" + whole[20:])  # SPARC
    assert "processor" in _refusal(file).message
    file.write_bytes(whole[:16] + b"\x02\x00" + whole[18:])  # a program
    _refusal(file)


def test_any_bytes_in_headers_are_read_or_refused(compile_toy: Compile) -> None:
    """Whatever the header and the table of sections say, nothing else is raised; no such file is loaded."""
    file = compile_toy("whole")
    whole = file.read_bytes()
    (table,) = struct.unpack_from("<Q", whole, 40)
    fields = [*range(16, 64), *range(table, len(whole))]
    far = bytearray(whole)
    far[47] = 0x80  # the table begins at 2^63 and more
    file.write_bytes(far)
    with pytest.raises(BackendFileError):
        backends._read(file)
    choose = random.Random(1)
    n_refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for place in choose.sample(fields, choose.randint(1, 4)):
            damaged[place] ^= choose.randint(1, 255)
        file.write_bytes(damaged)
        try:
            backends._read(file)
        except BackendFileError:
            n_refused += 1
    assert 0 < n_refused < 400


def test_libraries_that_are_no_backend_of_this_ggml(compile_toy: Compile, library_named: Callable[[str], str]) -> None:
    assert "no ggml backend" in _refusal(compile_toy("none", entry="")).message
    assert "API 99, " in _refusal(compile_toy("version", API_VERSION=99)).message
    assert "ggml_absent" in _refusal(compile_toy("undefined", CALLS="ggml_absent")).message
    assert (
        "libggml-base.so.9"
        in _refusal(compile_toy("other", "-Wl,--no-as-needed", library_named("libggml-base.so.9"))).message
    )
    neighbour = compile_toy("neighbour")
    neighbour.with_name("libggml-base.so.0.0.1").touch()
    assert "ggml 0.0.1" in _refusal(neighbour).message
    assert "own" in _refusal(compile_toy("own", OWN_GGML=1)).message


def test_libraries_that_offer_nothing_here(compile_toy: Compile, library_named: Callable[[str], str]) -> None:
    missing = _refusal(compile_toy("missing", "-Wl,--no-as-needed", library_named("libvulkan.so.77")))
    assert "needs libvulkan.so.77" in missing.message
    assert "Vulkan loader" in missing.hint
    assert "no device" in _refusal(compile_toy("deviceless", N_DEVICES=0)).message
    lavapipe = _refusal(compile_toy("vulkan", N_DEVICES=0, NAME='"Vulkan"'))
    assert "GGML_VK_VISIBLE_DEVICES=0" in lavapipe.hint
    assert "processor" in _refusal(compile_toy("score", SCORE=0)).message
    assert "CPU is here already" in _refusal(compile_toy("twice", NAME='"CPU"')).message


def test_commands_end_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_BACKEND_PATH", "")
    absent = tmp_path / "absent.so"
    assert str(absent) in refused("devices", "--backend", absent)
    monkeypatch.setenv("GGML_BACKEND_PATH", str(absent))
    assert str(absent) in refused("plan", "-dev", "Toy0")
    monkeypatch.setenv("GGML_BACKEND_PATH", "")
    assert ":" in refused("devices", "--backend", "a:b.so")


def test_requested_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_separator = tmp_path / f"a{os.pathsep}b.so"
    with_separator.touch()
    for value, expected in {
        "": [],
        "a.so": ["a.so"],
        f"a.so{os.pathsep}{os.pathsep}b.so": ["a.so", "b.so"],
        str(with_separator): [str(with_separator)],
        str(native.library_path()): [],
    }.items():
        monkeypatch.setenv("GGML_BACKEND_PATH", value)
        assert backends.requested_files() == [Path(name) for name in expected]


@pytest.mark.skipif(not VULKAN, reason="$MOEEDGE_VULKAN_BACKEND names no libggml-vulkan.so")
def test_the_vulkan_backend() -> None:
    found = _devices("--backend", VULKAN, GGML_VK_VISIBLE_DEVICES="0")
    assert found["Vulkan0"]["file"] == VULKAN
    assert found["Vulkan0"]["usable"]
    result = run_python(*_DEVICES, "--backend", VULKAN, VK_DRIVER_FILES="/dev/null", VK_ICD_FILENAMES="/dev/null")
    assert (result.returncode, result.stdout) == (2, "")
    assert "finds no Vulkan device" in result.stderr


@pytest.mark.parametrize(
    "name", [*re.findall(r"enum (moeedge_\w+)", Path(abi.__file__).read_text()), "moeedge_residency"]
)
def test_enums_are_those_of_the_header(name: str) -> None:
    kinds = [
        kind for kind in (*vars(abi).values(), Residency) if f"enum {name}" in (getattr(kind, "__doc__", "") or "")
    ]
    (block,) = re.findall(rf"enum {name} \{{(.*?)\n\}};", "".join(path.read_text() for path in HEADERS), re.DOTALL)
    there = {key: int(value) for key, value in re.findall(r"MOEEDGE_(\w+)\s*= (-?\d+)", block)}
    for member in (member for kind in kinds if issubclass(kind, Enum) for member in kind if member.name != "NOTHING"):
        assert {value for key, value in there.items() if key.endswith(f"_{member.name}")} == {member.value}
