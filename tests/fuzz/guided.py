"""What reads files from outside, fuzzed by coverage: atheris keeps inputs that reach new branches, and changes those,
half of the times as tests.fuzz does.

    pip install atheris
    python -m tests.fuzz.guided KIND --seconds S [--corpus FOLDER]

Anything but success or an error of moeedge/errors.py ends the run, and its input is written to crash-*; the corpus
starts with the kind's sound files. Runs in one process, so that only Python's own faults are found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.fuzz import texts


class Reader(NamedTuple):
    """place: module:function; suffixes: that its input may have; n_max: bytes of the longest input."""

    place: str
    suffixes: tuple[str, ...]
    n_max: int = 4096


READERS = {
    "jsonl": Reader("moeedge.data.datasets:load_dataset", (".jsonl", ".json", ".csv")),
    "trace": Reader("tests.fuzz.readers:trace", (".npz", ".csv"), 16384),
    "journal": Reader("tests.fuzz.readers:journal", (".jsonl",)),
    "measurements": Reader("tests.fuzz.readers:measurements", (".json",)),
    "chat": Reader("tests.fuzz.readers:unfinished", (".jsonl",)),
    "schema": Reader("tests.fuzz.readers:schema", (".json",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=READERS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path)
    options = parser.parse_args()
    import atheris

    place, suffixes, n_max = READERS[options.kind]
    with atheris.instrument_imports(include=["moeedge"]):
        module, _, name = place.partition(":")
        read: Callable[[str], object] = getattr(import_module(module), name)
        from moeedge.errors import MoeedgeError

    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or Path(folder) / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        _add_sound(corpus, suffixes, Path(folder))

        def one_input(data: bytes) -> None:
            path = Path(folder) / f"case{suffixes[data[0] % len(suffixes)] if data else suffixes[0]}"
            path.write_bytes(data[1:])
            with suppress(MoeedgeError):
                read(str(path))

        def changed(data: bytes, max_size: int, seed: int) -> bytes:
            rng, change = Random(seed), texts.mutated_archive if data[1:3] == b"PK" else texts.mutated
            if rng.random() < 0.5:
                return atheris.Mutate(data, max_size)
            return (data[:1] + change(rng, data[1:]))[:max_size]

        atheris.Setup(
            [sys.argv[0], str(corpus), f"-max_total_time={options.seconds}", f"-max_len={n_max}"],
            one_input,
            custom_mutator=changed,
        )
        atheris.Fuzz()


def _add_sound(corpus: Path, suffixes: tuple[str, ...], folder: Path) -> None:
    """Writes the sound files, each after a byte that says which suffix it has."""
    from tests.fuzz.__main__ import SOUND, seed_files

    find = seed_files(folder)
    for name in (*SOUND, "trace.npz"):
        suffix = Path(name).suffix
        if suffix in suffixes:
            (corpus / name).write_bytes(bytes([suffixes.index(suffix)]) + find(name).read_bytes())


if __name__ == "__main__":
    main()
