"""The file that a run keeps while it measures: its settings and every finished sample, so that it can be resumed.

JSON Lines. The first line is {"schema", "settings"}, with the settings of each part of the run (-t and other lists);
every other line is a sample with its part, its pass and its test. The samples have the tokens of their answers, which
the output check needs and a record leaves out. A line that an abort cut is ignored.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from fcntl import LOCK_EX, LOCK_NB, flock
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from moeedge.bench.config import BenchPlan
from moeedge.bench.samples import Sample
from moeedge.errors import InputError
from moeedge.hardware.provenance import Provenance
from moeedge.paths import cache_dir, read_text
from moeedge.schemas import read_json

SCHEMA = "moeedge-bench-run-1"
LAST = "last"  # names the newest file in `folder`
_LEAST_FREE_BYTES = 64 << 20  # on the disk with the file: a sample takes a few KiB
_MOST_FILES = 5  # of interrupted runs
_MOST_DIFFERENCES = 3  # in an error message
_HINT = "An interrupted bench names its file; --resume alone takes the newest."

Settings = dict[str, Any]
Place = tuple[int, int, str]  # where a sample was measured: part (of -t, -b and other lists), pass of that part, test


def folder() -> Path:
    """Returns the folder of the files of runs that have not ended."""
    return cache_dir() / "bench_runs"


def settings_of(plan: BenchPlan, environment: Provenance) -> Settings:
    """Returns what must be the same for samples of two runs to belong together: options, models, machine, versions."""
    values, dataset = asdict(plan.base), plan.dataset
    files = [path for path in (plan.base.model, plan.base.draft) if isinstance(path, Path)]
    del values["model"]
    values |= {
        "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "draft": None if plan.base.draft is None else Path(plan.base.draft).name,
        "modes": [mode.label for mode in plan.modes],
        "tests": [*(test.name for test in plan.tests), *(test.name for test in plan.scripted)],
        "confidences": [test.confidences for test in plan.scripted],
        "dataset": dataset and [dataset.name, dataset.sha256, [prompt.id for prompt in dataset.prompts]],
        "text": plan.text and plan.text.sha256,
    }
    of_plan = ("n_predict", "repetitions", "ignore_eos", "score", "run_code", "warm_up", "delay_s")
    of_machine = ("version", "commit", "llama_cpp_version", "cpu", "os", "trace_sha256", "model_header_sha256")
    values |= {name: getattr(plan, name) for name in of_plan}
    values |= {name: getattr(environment, name) for name in of_machine}
    return json.loads(json.dumps(values, default=str))  # type: ignore[no-any-return]


class Journal:
    """A context manager: every sample given to `add` is in the file when the call returns."""

    def __init__(self, path: Path | None, settings: Sequence[Settings], done: Sequence[tuple[Place, Any]] = ()) -> None:
        """path: None where no file can be written. done: samples that are in the file."""
        self.path, self._settings, self._done = path, list(settings), list(done)
        self._file: TextIOWrapper | None = None
        self.has_samples = bool(done)

    @classmethod
    def begin(cls, settings: Sequence[Settings]) -> Journal:
        """Returns the journal of a new run in the cache folder, without a file where there is no room for one."""
        try:
            folder().mkdir(parents=True, exist_ok=True)
            for old in _files()[:-_MOST_FILES]:
                with suppress(BlockingIOError), old.open("ab") as file:
                    _lock(file)  # not that of a run in another process
                    old.unlink()
            has_room = shutil.disk_usage(folder()).free >= _LEAST_FREE_BYTES
        except OSError:
            has_room = False
        if not has_room:
            return cls(None, settings)
        return cls(folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl", settings)

    @classmethod
    def resume(cls, name: str, settings: Sequence[Settings], kind: Any = Sample) -> Journal:
        """Returns the journal of an interrupted run, whose samples are of `kind`. Raises InputError where it cannot.

        name: of its file, or LAST.
        """
        if name == LAST and not _files():
            raise InputError("There is no interrupted bench to resume.", "Run bench without --resume.")
        path = Path(name)
        if name == LAST:  # of this command: lab rivals keeps its files there, too
            alike = (file for file in reversed(_files()) if _settings_in(file)[0].keys() == settings[0].keys())
            path = next(alike, _files()[-1])
        lines, head = read_text(path, _HINT, most_bytes=None).splitlines(), None
        with suppress(ValueError):
            head = read_json(lines[0]) if lines else None
        if not isinstance(head, dict) or head.get("schema") != SCHEMA or "settings" not in head:
            raise InputError(f"{path} is not the file of an interrupted bench.", _HINT)
        differences = ", ".join(_differences(head["settings"], list(settings))[:_MOST_DIFFERENCES])
        if differences:
            hint = "Repeat the command of the interrupted run exactly."
            raise InputError(f"{path} was measured with other settings: {differences}.", hint)
        done = {}
        for line in lines[1:]:
            with suppress(ValueError, KeyError, TypeError):  # the line that an abort cut
                entry = read_json(line)
                place = entry["part"], entry["pass"], entry["test"]
                sample = kind(**entry["sample"])
                done[place, sample.mode, sample.key] = (place, sample)  # what was measured again counts
        return cls(path, settings, list(done.values()))

    def __enter__(self) -> Journal:
        if (path := self.path) is not None:
            try:
                self._file = path.open("a", encoding="utf-8")
                _lock(self._file)
                if self._file.tell() == 0:
                    self._write({"schema": SCHEMA, "settings": self._settings})
                else:
                    self._file.write("\n")  # after a line that an abort cut
            except BlockingIOError:
                self._give_up()
                raise InputError(f"{path} belongs to a bench that is running.", "Wait for its end.") from None
            except OSError:
                self._give_up()
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        if not self.has_samples:  # an error, or Ctrl-C, before the first one: there is nothing to go on from
            self.drop()
            self.path = None

    @property
    def n_done(self) -> int:
        """Samples that the file holds."""
        return len(self._done)

    def samples(self, part: int, pass_index: int) -> dict[str, list[Any]]:
        """Returns the samples of a pass that the file had when it was opened, by test."""
        own = [(test, sample) for (*place, test), sample in self._done if place == [part, pass_index]]
        return {test: [sample for name, sample in own if name == test] for test, _ in own}

    def add(self, place: Place, sample: Any) -> None:
        """Writes a sample. A full disk ends the writing, not the run."""
        if self._file is not None:
            part, pass_index, test = place
            self.has_samples = True
            try:
                self._write({"part": part, "pass": pass_index, "test": test, "sample": asdict(sample)})
            except OSError:
                self._give_up()

    def drop(self) -> None:
        """The run is complete: its file in the cache folder is not needed any more."""
        if self.path is not None and self.path.parent == folder():
            self.path.unlink(missing_ok=True)

    def _give_up(self) -> None:
        """Nothing is written from here on; closing fails as well where the disk is full."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = self.path = None

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def _lock(file: IO[Any]) -> None:
    """Raises BlockingIOError where another process has the file; some file systems have no locks."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def _settings_in(path: Path) -> list[Settings]:
    """The settings in the head of a file, of each part; one part without any where it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError), path.open(encoding="utf-8") as file:
        found = read_json(file.readline())["settings"]
        if found and all(isinstance(part, dict) for part in found):
            return list(found)
    return [{}]


def _files() -> list[Path]:
    """The files of runs that have not ended, the one that was written last at the end."""
    return sorted(folder().glob("*.jsonl"), key=lambda path: (path.stat().st_mtime, path.name))


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Returns the differences of two JSON values, as "n_threads: 1, now 2"."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [text for key in keys for text in _differences(old.get(key), new.get(key), key)]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [text for before, after in zip(old, new, strict=True) for text in _differences(before, after, name)]
    before, after = (value if isinstance(value, str) else json.dumps(value) for value in (old, new))
    before, after = (text if len(text) <= 40 else f"{text[:37]}..." for text in (before, after))
    return [] if old == new else [f"{name}: {before}, now {after}"]
