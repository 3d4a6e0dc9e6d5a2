"""The table of environment variables is complete, and each of its names is read somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moeedge.health.doctor import BY_NAME, VARIABLES, set_variables
from tests.support.commands import reference

ROOT = Path(__file__).parents[1]
PLACES = ("moeedge", "tests", "models", ".ci")
SUFFIXES = (".py", ".cpp", ".h", ".txt", ".cmake", ".sh")
READ = re.compile(r"""(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\(|ENV\{)\s*["']?([A-Z][A-Z0-9_]+)""")
# a name in a string: of our prefix, and those that other libraries read and we mention
NAMED = re.compile(r"""["'](MOEEDGE_[A-Z_]+|HF_[A-Z_]+|HUGGINGFACE_[A-Z_]+|GGML_[A-Z_]+|GOMP_[A-Z]+|NO_COLOR)["']""")
NOT_OURS = {
    "PATH_VARIABLE",  # a constant of ours: GGML_BACKEND_PATH
    "LIBRARY_VARIABLE",  # likewise, in the tests
    "HUB_FILE",  # likewise, of an option of llama.cpp
    "PATH",
    "HOME",
    "XTERM_VERSION",  # by which terminals name themselves
    "STY",
}
OF_LIBRARIES = {  # which those below moeedge read by themselves
    "HF_TOKEN", "HF_HUB_DOWNLOAD_TIMEOUT", "HTTPS_PROXY", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "TMPDIR", "COLUMNS", "CMAKE_ARGS",
}  # fmt: skip


def sources(*places: str) -> dict[Path, str]:
    files = [path for place in places for path in (ROOT / place).rglob("*") if path.suffix in SUFFIXES]
    return {path: path.read_text(encoding="utf-8") for path in files}


def test_every_variable_that_the_program_reads_is_in_the_table() -> None:
    found = {name for text in sources("moeedge").values() for name in READ.findall(text) + NAMED.findall(text)}
    found = {name for name in found if not name.startswith(("LLAMA_ARG_", "MOEEDGE_LLAMA_CPP")) and name.isupper()}
    assert {"MOEEDGE_CACHE", "HUGGINGFACE_HUB_CACHE", "MOEEDGE_WERROR", "GGML_CPU_DISABLE_FUSION"} <= found
    assert found - NOT_OURS <= BY_NAME.keys(), "add them to moeedge/health/doctor.py"


def test_every_variable_of_ours_in_tests_is_in_the_table() -> None:
    found = {name for text in sources("tests", ".ci").values() for name in READ.findall(text)}
    assert {name for name in found if name.startswith("MOEEDGE_")} <= BY_NAME.keys()


def test_every_variable_of_the_table_is_read() -> None:
    text = "\n".join(
        text for path, text in sources(*PLACES).items() if path.name not in ("health/doctor.py", Path(__file__).name)
    )
    for variable in VARIABLES:
        assert variable.name in text or variable.name in OF_LIBRARIES, variable.name


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_the_reference_has_it(variable: object) -> None:
    assert f"| `{variable.name}`" in reference()  # type: ignore[attr-defined]


def test_what_is_set_and_acts() -> None:
    found = set_variables(
        {
            "MOEEDGE_CACHE": "/c",
            "HF_TOKEN": "hf_secret",
            "LLAMA_ARG_CTX_SIZE": "4096",
            "TERM": "xterm",
            "NO_COLOR": "1",
            "XDG_CACHE_HOME": "/x",
            "HF_HOME": "",
            "PATH": "/bin",
        }
    )
    assert [(each.name, each.value) for each in found] == [
        ("HF_TOKEN", "(set)"),
        ("LLAMA_ARG_CTX_SIZE", "4096"),
        ("MOEEDGE_CACHE", "/c"),
        ("NO_COLOR", "1"),
    ]
    assert found[2].variable is BY_NAME["MOEEDGE_CACHE"] and found[1].variable is None


def test_a_misspelt_name_gets_a_suggestion() -> None:
    (found,) = set_variables({"MOEEDGE_CACHE_DIR": "/c"})
    assert (found.variable, found.suggestion) == (None, "MOEEDGE_CACHE")
