"""A machine with little memory: what psutil says is free shrinks by the models that are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeedge.hardware import host
from moeedge.llama.model import Model


class SmallMachine:
    """Has `free_bytes` before anything is loaded, 1/32 of them as reserve; `loaded` are the models that were loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.loaded: list[Model] = []
        load = Model.load

        def remember(path: Path, **options: Any) -> Model:
            model = load(path, **options)
            if not model.header_only:
                self.loaded.append(model)
            return model

        monkeypatch.setattr(Model, "load", remember)
        monkeypatch.setattr(host, "_RESERVE_MIN_BYTES", 0)
        monkeypatch.setattr(
            "psutil.virtual_memory", lambda: SimpleNamespace(available=self.available_bytes, total=free_bytes)
        )

    @property
    def available_bytes(self) -> int:
        """Pages of a mapped file are available, those of open models that were loaded are not."""
        is_taken = [model.info.size_bytes for model in self.loaded if model.handle and model.storage == "loaded"]
        return max(0, self.free_bytes - sum(is_taken))
