"""Checks of folders and disks: where models are stored, where measurements are kept, how fast the disk is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from moeedge import paths
from moeedge.errors import ModelFileError
from moeedge.health.report import Finding
from moeedge.hub.cache import cached_models, hub_cache, unfinished_downloads
from moeedge.scheduler.measurement import measurement_dir
from moeedge.units import format_bytes, format_rate

_LITTLE_BYTES = 2 * 2**30  # of free disk
_SLOW_BYTES_PER_S = 200e6  # a hard disk or a network's: experts that are read from it take most of the time


def models() -> Iterator[Finding]:
    """The folder of downloads, and the disk that holds it."""
    folder = hub_cache()
    there = _existing(folder)
    free = shutil.disk_usage(there).free
    found = list(cached_models())
    text = f"{paths.short(folder)}: {len(found)} here, {format_bytes(free)} free"
    if unfinished := len(list(unfinished_downloads())):
        text += f", {unfinished} unfinished"
    if not os.access(there, os.W_OK):
        yield Finding("models", "warning", f"{text}, not writable", "Set HF_HUB_CACHE to a folder that you may write.")
    elif free < _LITTLE_BYTES:
        yield Finding("models", "warning", text, "Free some space (moeedge rm NAME), or set HF_HUB_CACHE elsewhere.")
    else:
        yield Finding("models", "ok", text)
    yield _disk([model.path for model in found])


def _disk(files: list[Path]) -> Finding:
    """The speed of the disk with the largest model, as it was measured, or by a glance."""
    try:
        from moeedge.scheduler import disk  # which needs llama.cpp

        files = sorted(files, key=lambda file: -file.stat().st_size) or [paths.bundled_target()]
        kept = disk.read_kept(files[0])
        if kept is not None:
            speed, how = kept.best.bytes_per_s, "measured"
        else:
            speed, direct = disk.quick_rate(files[0])
            how = "at a glance" if direct else "at a glance, the page cache may have helped"
    except (ModelFileError, ImportError, OSError) as error:
        return Finding("disk", "info", f"its speed is unknown: {error}")
    text = f"random reads of {format_rate(speed)}, {how}"
    if speed < _SLOW_BYTES_PER_S:
        return Finding("disk", "info", text, "Store models that are larger than RAM on a faster disk (HF_HUB_CACHE).")
    return Finding("disk", "ok", text)


def kept_files() -> Iterator[Finding]:
    """The folder of what moeedge keeps, and the measurements in it."""
    try:
        folder = paths.cache_dir()
    except OSError as error:
        hint = "Set MOEEDGE_CACHE to a folder that you may write; until then nothing is kept between runs."
        yield Finding("kept files", "warning", f"no cache folder: {error.strerror or error}", hint)
        return
    kept = list(measurement_dir().glob("*.json")) if measurement_dir().is_dir() else []
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if not os.access(folder, os.W_OK):
        hint = "Make it writable, or set MOEEDGE_CACHE to another folder: every run measures anew."
        yield Finding("kept files", "warning", f"{paths.short(folder)} is not writable", hint)
        return
    measured = f"{len(kept)} measurements" if kept else "nothing measured yet: the first chat measures"
    yield Finding("kept files", "ok", f"{paths.short(folder)}, {format_bytes(size)}: {measured}")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
