"""Every option of the command line, declared once and named as in llama.cpp where it has them.

A command gives the default; where it also needs another type or help text, `derive` changes a copy of the one
declaration, so that a name stands for the same thing in every command.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli import completion
from moeedge.cli.declare import OPTIONS, OUTPUT, Output, declare, derive, list_of, output_option

MODEL = "Model"
WORK = "Workload"
SAMPLING = "Sampling"
HARDWARE = "Hardware"
PLACEMENT = "Expert placement"
BUDGET = "Expert budget (lossy)"
TRACE = "Trace"

ALL_LAYERS = 999  # more than any model has


def ablations(given: list[str]) -> frozenset[str]:
    """The names that --ablate was given, one by one or as lists."""
    return frozenset(name.strip() for text in given for name in text.split(",") if name.strip())


def _model(text: str) -> Path:
    """A file, or a name; a URL of the hub becomes hf:..., since a path would merge its slashes."""
    return Path(re.sub(r"^https?://(huggingface|hf)\.co/", "hf:", text))


def _gpu_layers(text: str) -> int | None:
    if text in ("auto", "-1"):
        return None
    if text == "all":
        return ALL_LAYERS
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f'write a number of layers, auto or all, not "{text}".')
    return int(text)


def _name_backends(files: list[str] | None) -> list[str] | None:
    """Names the files in $GGML_BACKEND_PATH, where this process and its children look for them."""
    if not files:
        return files
    from moeedge.native.backends import PATH_VARIABLE

    paths = [str(Path(file).expanduser().absolute()) for file in files]
    if split := [path for path in paths if os.pathsep in path]:
        raise typer.BadParameter(f'The name of a backend cannot contain "{os.pathsep}": {split[0]}.')
    os.environ[PATH_VARIABLE] = os.pathsep.join(filter(None, [os.environ.get(PATH_VARIABLE), *paths]))
    return files


def _set_token(token: str | None) -> str | None:
    """Names the token where huggingface_hub looks for it."""
    if token:
        os.environ["HF_TOKEN"] = token
    return token


def _set_offline(offline: bool) -> bool:
    """Forbids requests to the hub, in huggingface_hub as well."""
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return offline


declare(
    MODEL,
    """
    -m, --model FILE|NAME  GGUF file, name of the catalog (moeedge list --all), or hf:OWNER/REPO:QUANT on the Hugging
        Face hub, also written -hf OWNER/REPO:QUANT; what is not on this machine is downloaded. Default: the bundled
        model.
        also: -mu --model-url LLAMA_ARG_MODEL LLAMA_ARG_HF_REPO LLAMA_ARG_MODEL_URL
    -md, --model-draft FILE|NAME|mtp|ngram|auto|none  Source of drafts, tokens guessed ahead that the model
        checks in one batch: a smaller model or an EAGLE-3 or DFlash draft of it (FILE, NAME), the head in the model's
        own file (mtp), the text so far (ngram), the best of these that is here (auto), or none. Default: auto in chat
        and bench; elsewhere the bundled or the catalog's draft, or none.
        also: --spec-draft-model LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_SPEC_DRAFT_HF_REPO
    --draft-max, --spec-draft-n-max, --gamma N  Tokens per draft (gamma): guesses that the model checks at once; 0:
        none. Default: the catalog's value, or 4.
        also: --draft --draft-n LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX
    --draft-p-min P  End drafts of a model before a token that it gives a probability below P, 0 to 1.
        also: --spec-draft-p-min LLAMA_ARG_SPEC_DRAFT_P_MIN
    -hft, --hf-token TOKEN  Token for gated or private repositories of the hub. Better in the environment: others can
        see a command line.
        also: HF_TOKEN
    --offline  Ask no server: a model that is not on this machine is an error.
        also: LLAMA_ARG_OFFLINE
    """,
    model={"parser": _model, "names": completion.models},
    model_draft={"names": completion.drafts},
    hf_token={"callback": _set_token},
    offline={"callback": _set_offline},
)
declare(
    WORK,
    """
    -p, --prompt TEXT  Prompt to answer; chat appends text that is piped in.
    -f, --file FILE  Read the prompt from a text file.
    --raw  Continue the text as it is, without a chat template.
    --dataset NAME|FILE.jsonl  Prompts: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample (some of each),
        toy (for the bundled pair), or a file of objects with "prompt", "turns" or "messages", one per line. Looked
        for in $MOEEDGE_DATA, the cache and the hub. Default: toy (bundled pair) or sample (other models) for profile,
        fit and ablate, and for bench with --policy, --cache-ratio or --score; otherwise llama-bench's synthetic
        tests.
    --offline-sample  Do not ask the hub: moeedge's own few prompts of the same kind, named sample, replace a dataset
        that is not on this machine.
    --limit N  At most N prompts of each dataset, spread evenly (replay: the first N texts); 0: all.
    -n, --n-predict N  At most N tokens per answer; -1 (chat, profile): until the model stops.
        also: --predict --n-gen --tokens LLAMA_ARG_N_PREDICT
    -r, --repetitions N  How often everything is measured.
        also: --repeat
    """,
    dataset={"names": completion.datasets},
)
declare(
    SAMPLING,
    """
    --temp X  Temperature; 0: greedy.
        also: --temperature LLAMA_ARG_TEMPERATURE
    -s, --seed N  Seed of all random choices; -1 (chat, profile): a new one each time.
    """,
)
declare(
    HARDWARE,
    """
    -c, --ctx-size N  Context: how many tokens of text the model sees; 0: as many as it was trained with, less where
        the memory is short: 8,192 where experts are loaded from the file (bench: as much as the prompts need; prompts
        that do not fit are left out).
        also: LLAMA_ARG_CTX_SIZE
    -t, --threads N  CPU threads; 0: one per physical core.
        also: LLAMA_ARG_THREADS
    -ngl, --n-gpu-layers N|auto|all  Layers whose attention and dense weights llama.cpp keeps on the GPU. Default:
        auto, all if experts are placed on a GPU, otherwise none.
        also: --gpu-layers LLAMA_ARG_N_GPU_LAYERS
    -ncmoe, --n-cpu-moe N  Keep the experts of the first N layers in host memory; the GPU has those of the other
        layers of -ngl entirely, and the expert cache serves the first N. Default: the fastest N, as measured on first
        use, unless --cache-ratio is given.
        also: LLAMA_ARG_N_CPU_MOE
    -cmoe, --cpu-moe  Keep the experts of all layers in host memory or the expert cache.
        also: LLAMA_ARG_CPU_MOE
    -dev, --device auto|none|emulated|NAME|rpc://HOST:PORT  Device that may hold experts: a GPU by name (moeedge
        devices), a worker on another machine, the emulated device (a second CPU instance;
        emulated:link=25GB/s,latency=20us,threads=2 slows its transfers down and sets its threads), or none. auto: the
        first GPU; without one none, but emulated for the bundled model in calibrate, ablate and bench's sweeps.
        also: LLAMA_ARG_DEVICE
    --backend FILE  A prebuilt ggml backend to load, for instance libggml-vulkan.so of the llama.cpp release that
        docs/devices.md names; its devices are used like llama.cpp's own. May be given several times.
        $GGML_BACKEND_PATH names such files, too, separated by ":".
    """,
    n_gpu_layers={"parser": _gpu_layers},
    device={"names": completion.devices},
    backend={"callback": _name_backends},
)
declare(
    PLACEMENT,
    f"""
    --ram SIZE|auto|off  Memory for experts of a model that is larger than the memory: they are loaded from the file
        as they are needed; next to a GPU, those that are not on it. auto: all free memory, if the file (its part in
        host memory) does not fit there; off: llama.cpp maps the file.
    --no-warm-start  Experts in RAM: do not load those first that earlier runs used most, and keep nothing of this
        run.
    --vram SIZE  Memory of the device for experts, for instance 6GB or 512MiB. Default: what is free, minus a reserve.
    --cache-ratio R  Share of all expert bytes that the device holds, 0 to 1. Default for the emulated device: 0.17.
    --policy NAME  Policy that decides which experts the device holds: {", ".join(completion.ENGINE_POLICIES[:-1])} or
        none.
    --ablate NAME  Switch a part of the policy off (MoE-SpAc, Table 4): no-spec-ue, no-ada-bc, no-het-wb, no-prefetch,
        no-evict or no-sd. May be given several times, or as a list separated by commas.
    -K, --utility-cap K  Highest utility that a policy gives an expert (K).
    --forgetting L  Forgetting factor of spac-paper's boundaries (lambda), 0 to 1.
    --prefill-path auto|cpu|resident|stream  How prompts are computed: as without a cache, with resident experts on
        the device, with all experts streamed through the device, or auto: the fastest as measured.
    --no-calibrate  Do not measure machine and device on first use; earlier measurements are still used.
    """,
    policy={"names": lambda: completion.ENGINE_POLICIES},
)
declare(
    OUTPUT,
    """
    --verbose  Show llama.cpp's log on standard error, and no live panel or progress bar.
        also: -v --log-verbose
    --plot FILE  Draw the result (.png, .svg or .pdf). bench: pair hits and speed over the cache ratio, a line per
        policy, or quality over speed with --expert-budget; profile: activations and prediction accuracy, step by step
        for one layer.
    --trace-out FILE.npz  Write the routing of every token, rejected drafts included (docs/lab/traces.md).
    """,
)

# for commands that take an option by itself
Model = Annotated[Path | None, OPTIONS["model"]]
ModelDraft = Annotated[str | None, OPTIONS["model_draft"]]
DraftMax = Annotated[int | None, OPTIONS["draft_max"]]
Prompt = Annotated[str | None, OPTIONS["prompt"]]
PromptFile = Annotated[Path | None, OPTIONS["file"]]
Raw = Annotated[bool, OPTIONS["raw"]]
Dataset = Annotated[str | None, OPTIONS["dataset"]]
OfflineSample = Annotated[bool, OPTIONS["offline_sample"]]
Limit = Annotated[int, OPTIONS["limit"]]
NPredict = Annotated[int, OPTIONS["n_predict"]]
Repetitions = Annotated[int, OPTIONS["repetitions"]]
Temp = Annotated[float, OPTIONS["temp"]]
Seed = Annotated[int, OPTIONS["seed"]]
CtxSize = Annotated[int, OPTIONS["ctx_size"]]
Threads = Annotated[int, OPTIONS["threads"]]
NGpuLayers = Annotated[int | None, OPTIONS["n_gpu_layers"]]
Device = Annotated[str, OPTIONS["device"]]
Backend = Annotated[list[str] | None, OPTIONS["backend"]]
Ram = Annotated[str, OPTIONS["ram"]]
Vram = Annotated[str | None, OPTIONS["vram"]]
CacheRatio = Annotated[float | None, OPTIONS["cache_ratio"]]
Policy = Annotated[str, OPTIONS["policy"]]
Ablate = Annotated[list[str], OPTIONS["ablate"]]
UtilityCap = Annotated[int, OPTIONS["utility_cap"]]
Forgetting = Annotated[float, OPTIONS["forgetting"]]
PrefillPath = Annotated[str, OPTIONS["prefill_path"]]
NoCalibrate = Annotated[bool, OPTIONS["no_calibrate"]]
Offline = Annotated[bool, OPTIONS["offline"]]
Verbose = Annotated[bool, OPTIONS["verbose"]]
Plot = Annotated[Path | None, OPTIONS["plot"]]
TraceOut = Annotated[Path | None, OPTIONS["trace_out"]]

DraftLength = Annotated[
    str | None,
    derive(
        DraftMax,
        metavar="N|auto",
        help="Tokens per draft (gamma); 0: no speculation; auto: up to 16, each step as many as pay by what steps have "
        "cost so far. Default: auto in a chat, unless sampled answers have a seed (-s), whose tokens repeat "
        "with a fixed length only; otherwise the catalog's value for the model, or 4.",
    ),
]
DraftMaxList = Annotated[
    str,
    derive(
        DraftMax,
        metavar="LIST",
        help="Tokens per draft (gamma); 0: no speculation. Several, separated by commas, are compared.",
    ),
]
CacheRatioList = Annotated[str, list_of(CacheRatio)]
PolicyList = Annotated[str, list_of(Policy)]
SystemList = Annotated[
    str,
    derive(
        Policy,
        metavar="LIST",
        help="Policies and systems to compare, separated by commas, or all; docs/policies.md lists them.",
        autocompletion=completion.completer(lambda: completion.ENGINE_POLICIES + completion.SIMULATED_POLICIES),
    ),
]
UtilityCapList = Annotated[str, list_of(UtilityCap)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and stop.")]
TextOrJson = Annotated[
    Output, output_option(Output.TEXT, Output.JSON, help="Print text or JSON; sizes in bytes, times in s.")
]
