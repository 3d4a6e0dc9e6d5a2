"""Checks of environment variables: those that are set and act, and those that cannot be right."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from moeedge.health.report import Finding
from moeedge.variables import OPTION_PREFIX, SetVariable, set_variables

_FOLDERS = ("MOEEDGE_DATA",)
_FILES = ("MOEEDGE_CATALOG", "MOEEDGE_LIBRARY")


def environment(values: Mapping[str, str] = os.environ, *, honoured: Collection[str] = ()) -> Iterator[Finding]:
    """One finding for all that is well, one for each variable that is not.

    honoured: the variables of llama.cpp's options (LLAMA_ARG_*) that act here.
    """
    found = set_variables(values)
    wrong = {variable.name: finding for variable in found if (finding := _wrong(variable, honoured)) is not None}
    well = [f"{variable.name}={variable.value}" for variable in found if variable.name not in wrong]
    yield Finding("variables", "ok", ", ".join(well) or "none set that acts here")
    yield from wrong.values()


def _wrong(found: SetVariable, honoured: Collection[str]) -> Finding | None:
    text = f"{found.name}={found.value}"
    if found.name in _FOLDERS and not Path(found.value).is_dir():
        return Finding("variables", "warning", f"{text}: no such folder", f"Unset {found.name}, or name a folder.")
    if found.name in _FILES and not Path(found.value).expanduser().is_file():
        return Finding("variables", "broken", f"{text}: no such file", f"Unset {found.name}, or name a file.")
    if found.variable is None and found.name.startswith("MOEEDGE_"):
        meant = f"Did you mean {found.suggestion}?" if found.suggestion else "docs/cli.md lists those that do."
        return Finding("variables", "warning", f"{text} has no effect", meant)
    if found.name.startswith(OPTION_PREFIX) and found.name not in honoured:
        return Finding("variables", "info", f"{text} has no effect here", "docs/cli.md lists those that have.")
    if found.name == "HF_HUB_OFFLINE" and found.value.upper() in ("1", "TRUE", "YES", "ON"):
        return Finding("variables", "info", f"{text}: nothing is downloaded", "Unset it before moeedge pull.")
    if found.name == "GGML_CPU_DISABLE_FUSION":
        return Finding("variables", "info", f"{text}: the CPU computes slower", "Unset it.")
    return None
