"""The lanes of the GPU benchmark: stock llama.cpp with its experts placed as its users place them, and moeedge.

Each lane is one session; speculation is switched by its draft length, so that a lane's weights are loaded once.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hardware import devices
from moeedge.hardware.devices import resolve
from moeedge.hardware.spec import DeviceSpec
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.records import as_dict
from moeedge.scheduler.config import PlacementConfig

GREEDY = SamplingConfig(temperature=0.0)
ALL_LAYERS = 999


@dataclass(frozen=True)
class Settings:
    """What the lanes share."""

    model: Path
    draft: Path
    device: str  # as -dev takes it; "emulated..." in a dry run
    ratio: float
    gamma: int = 8
    n_ctx: int = 1024
    n_threads: int = 0

    @property
    def gpu(self) -> bool:
        return not self.device.startswith("emulated")


def layers_on_device(path: Path, ratio: float) -> tuple[int, int]:
    """How many layers' experts fit into that share of all expert bytes, and how many layers have experts."""
    tensors, _ = expert_tensors(path)
    layers = {tensor.layer for tensor in tensors}
    per_layer = expert_bytes(tensors) / len(layers)
    return int(ratio * expert_bytes(tensors) // per_layer), len(layers)


def load_stock(settings: Settings, n_cpu_moe: int) -> Model:
    """The model as llama.cpp loads it with -ngl 99 --n-cpu-moe N: the experts of the first N layers on the CPU."""
    if not settings.gpu:
        return Model.load(settings.model, device="none")
    return Model.load(
        settings.model,
        n_gpu_layers=ALL_LAYERS,
        device=settings.device,
        experts_on_cpu=True,
        n_cpu_moe=n_cpu_moe,
        repack=False,
    )


def open_stock(settings: Settings, n_cpu_moe: int, draft: Model) -> Session:
    """A session of stock llama.cpp; its models are the caller's to close."""
    config = EngineConfig(
        model=settings.model,
        draft=settings.draft,
        gamma=settings.gamma,
        n_ctx=settings.n_ctx,
        n_threads=settings.n_threads,
        n_gpu_layers=ALL_LAYERS if settings.gpu else 0,
        device=settings.device if settings.gpu else "none",
        mode="stock",
    )
    return Session.open(config, model=load_stock(settings, n_cpu_moe), draft_model=draft)


def open_moeedge(settings: Settings) -> Session:
    """moeedge as a user gets it, but for the ratio."""
    return Session.open(_config(settings))


def open_static(settings: Settings, other: Session) -> Session:
    """The same without drafts, on the target of another session: once the cache is full nothing is uploaded."""
    config = replace(_config(settings, policy="static"), draft=None, gamma=0)
    return Session.open(config, model=other.model)


def _config(settings: Settings, **placement: Any) -> EngineConfig:
    return EngineConfig(
        model=settings.model,
        draft=settings.draft,
        gamma=settings.gamma,
        n_ctx=settings.n_ctx,
        n_threads=settings.n_threads,
        device=settings.device,
        placement=PlacementConfig(cache_ratio=settings.ratio, **placement),
    )


@dataclass(frozen=True)
class Answer:
    """One sample of a lane."""

    repetition: int
    order: int  # place in its round
    pp_ts: float
    tg_ts: float
    prefill_s: float
    decode_s: float
    drafted: int
    accepted: int
    tokens: list[int]
    placement: dict[str, Any] | None  # counters of this answer alone


def run_answer(
    session: Session, gamma: int, prompt: Sequence[int], n_predict: int, *, repetition: int, order: int
) -> Answer:
    """One greedy answer with empty KV caches; n_predict tokens whatever the model wants."""
    session.reset()
    session.gamma = gamma
    before = session.placement_stats()
    generation = session.generate(prompt, n_predict=n_predict, sampling=GREEDY, ignore_eos=True)
    for _ in generation:
        pass
    after = session.placement_stats()
    stats = generation.stats
    return Answer(
        repetition=repetition,
        order=order,
        pp_ts=stats.pp_ts,
        tg_ts=stats.tg_ts,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
        drafted=stats.drafted,
        accepted=stats.accepted,
        tokens=generation.tokens,
        placement=as_dict(after - before) if before is not None and after is not None else None,
    )


def forced_logits(session: Session, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Logits from which each of `tokens` was to be chosen, one token at a time: float32 [len(tokens), n_vocab]."""
    session.reset()
    rows = [session.target.decode(prompt, phase=Phase.PREFILL, logits="last")[0].copy()]
    for token in tokens[:-1]:
        rows.append(session.target.decode([token], phase=Phase.DECODE, logits="last")[0].copy())
    return np.stack(rows)


def describe_gpu() -> dict[str, str] | None:
    """What the driver says of its first card; None without a driver."""
    keys = ("name", "driver_version", "compute_cap", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(keys, (value.strip() for value in lines[0].split(",")), strict=True))


def vram_bytes(device: str) -> int:
    """Bytes in use on the device, all processes together; 0 where it has no memory of its own."""
    resolved = resolve(DeviceSpec.parse(device))
    reading = devices.read_memory(resolved) if resolved.kind == "gpu" else None
    return reading.used_bytes if reading else 0
