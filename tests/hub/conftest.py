"""Shared by the tests of pull: a local hub with two small repositories, a catalog of them, and the program."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hub import COMMIT, Hub, local_hub

BIG = ("me/big-GGUF", "big-Q4_K_M.gguf")
SMALL = ("me/small-GGUF", "small-Q8_0.gguf")
_CATALOG = """
[[model]]
name = "big"
aliases = ["big:1b"]
about = "a target"
licence = "mit"
drafts = ["small"]
draft_max = 6

[[model.variant]]
quant = "Q4_K_M"
repo = "me/big-GGUF"
revision = "{commit}"
files = ["big-Q4_K_M.gguf"]
size_bytes = [{big_bytes}]
sha256 = ["{big_sha256}"]

[[model]]
name = "small"
licence = "apache-2.0"

[[model.variant]]
quant = "Q8_0"
repo = "me/small-GGUF"
files = ["small-Q8_0.gguf"]
about_gb = 0.5
"""


def sha256(body: bytes) -> str:
    """As the hub and the catalog write it."""
    return hashlib.sha256(body).hexdigest()


@dataclass(frozen=True)
class HubMachine:
    """A separate machine: a cache, a catalog, and the program run against the local hub."""

    hub: Hub
    folder: Path

    def environment(self, **extra: str) -> dict[str, str]:
        """The program's environment, without the user's own settings."""
        ours = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.folder / "hf"), "NO_COLOR": "1"}
        ours |= {"MOEEDGE_CATALOG": str(self.catalog), "MOEEDGE_CACHE": str(self.folder / "cache")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
        return kept | ours | extra

    @property
    def catalog(self) -> Path:
        return self.folder / "catalog.toml"

    def write_catalog(self) -> None:
        """Writes a catalog with the current size and hash of the big file."""
        big = self.hub.files[BIG]
        self.catalog.write_text(_CATALOG.format(commit=COMMIT, big_bytes=len(big), big_sha256=sha256(big)))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "moeedge", *arguments]

    def run(
        self, *arguments: str, code: int = 0, before: Callable[[], None] | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the program to its end, which has to be with exit code `code`; `before` runs in the child."""
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=before,
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        return done

    def blobs(self, repo: str) -> dict[str, bytes]:
        """Blobs of a repository in the cache, complete and unfinished, by name."""
        folder = self.folder / "hf" / "hub" / f"models--{repo.replace('/', '--')}" / "blobs"
        return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[HubMachine]:
    """A machine with files of 3 MB and 70 kB, which are no models."""
    rng = random.Random(0)
    with local_hub({BIG: rng.randbytes(3_000_000), SMALL: rng.randbytes(70_000)}) as hub:
        here = HubMachine(hub, tmp_path)
        here.write_catalog()
        yield here
