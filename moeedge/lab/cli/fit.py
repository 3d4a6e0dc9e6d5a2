"""`moeedge lab fit`: measure the parts of a speculative step, fit MoESD's model, and predict what speculation gains."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import integers, show_log
from moeedge.cli.declare import Output, option
from moeedge.cli.engine_options import EngineOptions

BatchTokens = Annotated[
    str,
    option(options.WORK, "--batch-tokens LIST", "Tokens in a batch of the target, 1 to 64, whose times are measured."),
]
BatchSizes = Annotated[
    str, option(options.WORK, "--batch-sizes LIST", "Sequences in a batch, for which speed-ups are predicted.")
]
NExpertUsed = Annotated[
    str | None,
    option(
        options.MODEL,
        "--n-expert-used LIST",
        "Experts per token to measure with, at most the model's number. Default: the model's and half of it; the "
        "difference says what experts cost.",
    ),
]


def fit(
    batch_tokens: BatchTokens = "1,2,3,4,5,6,7,8,9,12,16,24,32,48",
    draft_max: options.DraftMaxList = "1,2,3,4,5,6,7,8",
    batch_sizes: BatchSizes = "1,2,4,8,16,32,64",
    n_expert_used: NExpertUsed = None,
    dataset: options.Dataset = None,
    limit: options.Limit = 8,
    offline_sample: options.OfflineSample = False,
    n_predict: options.NPredict = 96,
    repetitions: options.Repetitions = 5,
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    offline: options.Offline = False,
    ctx_size: options.CtxSize = 0,
    threads: options.Threads = 0,
    n_gpu_layers: options.NGpuLayers = None,
    device: options.Device = "none",
    backend: options.Backend = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Measure what a step of a model and its draft takes, and predict what drafts gain.

    Times the model over 1 to 48 tokens, its draft, and the choice of tokens; fits a formula of ten parameters to that
    (MoESD, docs/lab/speed-model.md); and predicts the gain by draft length and texts at a time, and for other numbers
    of experts per token. Needs a quiet machine: where the fit misses times that it was not given
    by more than 15 % (median), there are no predictions, and the exit code is 1.
    """
    engine = EngineOptions(
        model=model,
        model_draft=model_draft,
        ctx_size=ctx_size,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        device=device,
        backend=backend,
    )
    engine.limit_openmp_spin()
    from moeedge.lab.experiments.speculation_fit import FitPlan, run_fit
    from moeedge.lab.views.fit_views import print_fit
    from moeedge.ui.console import notifier, say, stderr_console, stdout_console
    from moeedge.ui.progress import count_bar

    plan = FitPlan(
        tokens=tuple(sorted(integers(batch_tokens, "--batch-tokens"))),
        gammas=tuple(sorted(integers(draft_max, "--draft-max"))),
        batch_sizes=tuple(sorted(integers(batch_sizes, "--batch-sizes"))),
        n_used=() if n_expert_used is None else tuple(integers(n_expert_used, "--n-expert-used")),
        repetitions=repetitions,
        n_predict=n_predict,
    )
    from moeedge.data.datasets import load_dataset
    from moeedge.engine.context_choice import thread_notes
    from moeedge.scheduler.config import PlacementConfig

    config = engine.config(PlacementConfig(cache_ratio=0.0))  # an expert cache would change while times are taken
    if limit < 0:
        raise ValueError(f"--limit must be 0 (all) or more, not {limit}")
    name = dataset or ("toy" if paths.is_bundled(config.model) else "sample")
    prompts = load_dataset(name, offline_sample=offline_sample).limited(limit or None).prompts
    if verbose:
        show_log()
    err = stderr_console()
    for note in thread_notes(threads):
        say(err, note, style="yellow")
    with count_bar(err, "", "passes", 0) as bar:

        def begin(label: str, total: int) -> None:
            bar.update(description=label, total=total, completed=0)

        report = run_fit(config, prompts, plan, notify=notifier(err), on_part=begin, on_pass=bar.add)
    if output is Output.JSON:
        typer.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    elif report.is_usable:
        print_fit(report, stdout_console())
    if not report.is_usable:
        raise report.unusable()
