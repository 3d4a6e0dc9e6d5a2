"""`moeedge calibrate`: measure the machine for the scheduler, on the real model and device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import Output, cli_errors, show_log
from moeedge.cli.pair import check_device, limit_openmp_spin, placement_config, resolve_pair
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import InputError


def calibrate(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    draft_max: options.DraftMax = None,
    ctx_size: options.CtxSize = 0,
    threads: options.Threads = 0,
    n_gpu_layers: options.NGpuLayers = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    cache_ratio: options.CacheRatio = None,
    policy: options.Policy = "spac",
    utility_cap: options.UtilityCap = 4,
    output: Annotated[Output, typer.Option("-o", "--output", help="Print tables, or one JSON object.")] = Output.TABLE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show llama.cpp's log on standard error.")] = False,
) -> None:
    """Measure how long experts take on the CPU, on the device and between them, and keep it for later runs.

    chat and bench do this by themselves the first time that a model meets a device; this command does it anew and shows
    what comes out: unit times, shares of the work at each threshold, whole steps with and without the cache, prompts.
    """
    limit_openmp_spin(device, may_emulate=model is None or paths.is_bundled(model))
    from moeedge.engine.session import Session
    from moeedge.ui.bench_views import print_calibration
    from moeedge.ui.console import notifier, say, stderr_console, stdout_console

    with cli_errors():
        placement = placement_config(
            vram=vram, cache_ratio=cache_ratio, policy=policy, utility_cap=utility_cap, measure_anew=True
        )
        check_device(device)
        config = resolve_pair(model, model_draft).engine_config(
            ctx_size=ctx_size,
            threads=threads,
            draft_max=draft_max,
            n_gpu_layers=n_gpu_layers,
            device=device,
            placement=placement,
            emulate=True,
        )
        if verbose:
            show_log()
        err = stderr_console()
        with Session.open(config, notify=notifier(err)) as session:
            info, calibration = session.info, session.calibration
        for note in info.notes:
            say(err, note)
        if calibration is None:
            if info.cache_slots:
                raise InputError(f"A context of {info.n_ctx} tokens has no room to measure in.", "Use a larger -c.")
            raise InputError("Nothing was measured: no experts lie on a device.", _hint(config, info))
        if output is Output.JSON:
            about = {
                "model": info.model,
                "device": info.device,
                "threads": info.n_threads,
                "gamma": info.gamma,
                "policy": policy,
                "cache_ratio": info.cache_ratio,
                "cache_slots": info.cache_slots,
            }
            typer.echo(json.dumps(about | json.loads(calibration.to_json())))
        else:
            print_calibration(calibration, info, stdout_console())


def _hint(config: EngineConfig, info: EngineInfo) -> str:
    """What to change so that experts lie on a device."""
    from moeedge.engine.loading import resolve_device

    if info.n_experts == 0:
        return "Name a model with experts: -m FILE."
    if resolve_device(config).kind == "none":
        return "Name one, for instance -dev emulated."
    return "Give the cache room: --cache-ratio R or --vram SIZE."
