"""The table of options that several commands have, named as in llama.cpp; a command's own table changes them."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from operator import not_
from pathlib import Path
from typing import Any, Literal

import typer

from moeedge.cli.common import integers, memory_size
from moeedge.cli.completion import datasets, devices, drafts, models
from moeedge.cli.declare import OPTIONS, Output, declare, flatten, output_parser
from moeedge.cli.foreign import SWITCH
from moeedge.errors import InputError
from moeedge.llama.settings import KV_TYPES, LoraAdapter, TensorOverride
from moeedge.policies.registry import POLICIES
from moeedge.units import visible

__all__ = ["OPTIONS", "Output", "declare", "flatten", "output_parser"]

_DIGITS_MAX = 9  # no model has so many experts
ALL_LAYERS = 999  # more than any model has


def ablations(texts: list[str]) -> frozenset[str]:
    """The names of --ablate, one by one or as lists."""
    return frozenset(name.strip() for text in texts for name in text.split(",") if name.strip())


def _model(text: str) -> Path:
    """A file, or a name; a URL of the hub becomes hf:..., since a path would merge its slashes."""
    return Path(re.sub(r"^https?://(huggingface|hf)\.co/", "hf:", text))


def gpu_layers(text: str) -> int | None:
    """A value of -ngl; None: automatic. Raises typer.BadParameter."""
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


def _set_variable(name: str, value: Any) -> Any:
    """Sets a variable that huggingface_hub reads to the value of an option, where there is one."""
    if value:
        os.environ[name] = str(value if value is not True else 1)
    return value


class _VisibleFormatter(logging.Formatter):
    """Shows the control characters of what a model file says."""

    def format(self, record: logging.LogRecord) -> str:

        return visible(super().format(record))


def _show_log(wanted: bool) -> bool:
    """Sends the logs of moeedge and of llama.cpp, which does not propagate, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter("%(name)s: %(message)s"))  # moeedge.llama: ...
    for name in ("moeedge", "moeedge.llama") if wanted else ():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)  # at DEBUG llama.cpp writes hundreds of lines per graph
    return wanted


def _ram(text: str, option: str) -> int | str:
    return text if text in ("auto", "off") else memory_size(text, option)


def _draft_length(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        what = f"--draft-max takes a number of tokens or auto, not '{text}'."
        raise InputError(what, "Write for instance --draft-max 4; 0 switches drafts off.") from None


def _adapters(texts: Sequence[str]) -> tuple[LoraAdapter, ...]:
    return tuple(LoraAdapter(Path(name)) for text in texts for name in text.split(","))


def _scaled_adapters(texts: Sequence[str]) -> tuple[LoraAdapter, ...]:
    adapters = []
    for item in (item for text in texts for item in text.split(",")):
        name, _, scale = item.rpartition(":")
        try:
            adapters.append(LoraAdapter(Path(name), float(scale)))
        except ValueError:
            raise ValueError(f"--lora-scaled takes FILE:SCALE, such as adapter.gguf:0.5, not {item!r}") from None
    return tuple(adapters)


def parse_budget(text: str) -> int | Literal["auto"] | None:
    """A value of --expert-budget: experts per layer, "auto", or None for "off". Raises InputError."""
    is_auto = text.strip().lower() == "auto"
    return "auto" if is_auto else parse_number(text, "a number of experts per layer, auto or off")


def parse_number(text: str, values: str = "numbers of experts per layer, or off") -> int | None:
    """Experts per layer, None for "off"; values: what is allowed. Raises InputError."""
    word = text.strip().lower()
    if word == "off":
        return None
    if not word.isdecimal() or len(word) > _DIGITS_MAX or int(word) < 1:
        raise InputError(f'--expert-budget takes {values}, not "{text}".', "Try --expert-budget 16.")
    return int(word)


declare(
    f"""
    [Model]
    * -m, --model FILE|NAME  GGUF file, name of the catalog (moeedge list --all), or hf:OWNER/REPO:QUANT on the Hugging
        Face hub, also written -hf OWNER/REPO:QUANT; what is not on this machine is downloaded. Default: the bundled
        model.
        also: -mu --model-url LLAMA_ARG_MODEL LLAMA_ARG_HF_REPO LLAMA_ARG_MODEL_URL
    * -md, --model-draft FILE|NAME|mtp|ngram|auto|none  Source of drafts, tokens guessed ahead that the model
        checks in one batch: a smaller model or an EAGLE-3 or DFlash draft of it (FILE, NAME), the head in the model's
        own file (mtp), the text so far (ngram), the best of these that is here (auto), or none. Default: auto in chat
        and bench; elsewhere the bundled or the catalog's draft, or none.
        also: --spec-draft-model LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_SPEC_DRAFT_HF_REPO
    * --draft-max, --spec-draft-n-max, --gamma N|auto  Tokens per draft (gamma); 0: no speculation; auto: up to 16,
        each step as many as pay by what steps have cost so far. Default: auto in a chat, unless sampled answers have a
        seed (-s), whose tokens repeat with a fixed length only; otherwise the catalog's value for the model, or 4.
        also: --draft --draft-n LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX
        set: gamma: tokens per draft; 0: none; auto: as many as pay
    --draft-p-min P  End drafts of a model before a token that it gives a probability below P, 0 to 1.
        also: --spec-draft-p-min LLAMA_ARG_SPEC_DRAFT_P_MIN
    -hft, --hf-token TOKEN  Token for gated or private repositories of the hub. Better in the environment: others can
        see a command line.
        also: HF_TOKEN
    * --offline  Ask no server: a model that is not on this machine is an error.
        also: LLAMA_ARG_OFFLINE
    []
    --dry-run  Show what would be done, and stop.
    [Workload]
    * -p, --prompt TEXT  Prompt to answer; chat appends text that is piped in.
    * -f, --file FILE  Read the prompt from a text file.
    * --raw  Continue the text as it is, without a chat template.
    * --dataset NAME|FILE.jsonl  Prompts: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample (some of each),
        toy (for the bundled pair), or a file of objects with "prompt", "turns" or "messages", one per line. Looked
        for in $MOEEDGE_DATA, the cache and the hub. Default: toy (bundled pair) or sample (other models) for profile,
        fit and ablate, and for bench with --policy, --cache-ratio or --score; otherwise llama-bench's synthetic
        tests.
    --offline-sample  Do not ask the hub: moeedge's own few prompts of the same kind, named sample, replace a dataset
        that is not on this machine.
    * --limit N  At most N prompts of each dataset, spread evenly (replay: the first N texts); 0: all.
    * -n, --n-predict N  At most N tokens per answer; -1 (chat, profile): until the model stops.
        also: --predict --n-gen --tokens LLAMA_ARG_N_PREDICT
        set: n_predict n num_predict: longest answer in tokens; -1: until the model stops
    * -r, --repetitions N  How often everything is measured.
        also: --repeat
    [Sampling]
    * --temp X  Temperature; 0: greedy.
        also: --temperature LLAMA_ARG_TEMPERATURE
        set: temp: randomness; 0: always the most likely token
    * -s, --seed N  Seed of all random choices; -1 (chat, profile): a new one each time.
        set: seed: of the random numbers
    [Hardware]
    * -c, --ctx-size N  Context: how many tokens of text the model sees; 0: as many as it was trained with, less where
        the memory is short: 8,192 where experts are loaded from the file (bench: as much as the prompts need; prompts
        that do not fit are left out).
        also: LLAMA_ARG_CTX_SIZE
        set: ctx c n_ctx ctx_size num_ctx: size of the context in tokens
    * -t, --threads N  CPU threads; 0: one per physical core, next to a GPU's cache two logical cores less.
        also: LLAMA_ARG_THREADS
    * -ngl, --n-gpu-layers N|auto|all  Layers on the GPU: those whose attention and dense weights llama.cpp keeps
        there. Default: auto, all if experts are placed on a GPU, otherwise none.
        also: --gpu-layers LLAMA_ARG_N_GPU_LAYERS
    * -ncmoe, --n-cpu-moe N  Experts of the first N layers stay in host memory; the GPU has those of the other
        layers of -ngl entirely, and the expert cache serves the first N. Default: the fastest N, as measured on first
        use, unless --cache-ratio is given.
        also: LLAMA_ARG_N_CPU_MOE
    -cmoe, --cpu-moe  Keep the experts of all layers in host memory or the expert cache.
        also: LLAMA_ARG_CPU_MOE
    * -dev, --device auto|none|emulated|NAME|rpc://HOST:PORT  Device that may hold experts: a GPU by name (moeedge
        devices), a worker on another machine, the emulated device (a second CPU instance;
        emulated:link=25GB/s,latency=20us,threads=2 slows its transfers down and sets its threads), or none. auto: the
        first GPU; without one none, but emulated for the bundled model in calibrate, ablate and bench's sweeps.
        also: LLAMA_ARG_DEVICE
    --backend FILE  A prebuilt ggml backend to load, for instance libggml-vulkan.so of the llama.cpp release that
        docs/devices.md names; its devices are used like llama.cpp's own. May be given several times.
        $GGML_BACKEND_PATH names such files, too, separated by ":".
    [Context and loading (llama.cpp)]
    -ctk, --cache-type-k TYPE  Type of the keys in the KV cache: {", ".join(KV_TYPES)}. q8_0 takes about half the
        memory of f16, q4_0 a quarter; other types than f16 change answers slightly.
        also: LLAMA_ARG_CACHE_TYPE_K type_k
    -ctv, --cache-type-v TYPE  Type of the values in the KV cache, as -ctk; a quantized one (q8_0 and below) needs
        flash attention.
        also: LLAMA_ARG_CACHE_TYPE_V type_v
    -ctkd, --cache-type-k-draft TYPE  Type of the keys in the draft's KV cache.
        also: --spec-draft-type-k LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K draft_type_k
    -ctvd, --cache-type-v-draft TYPE  Type of the values in the draft's KV cache.
        also: --spec-draft-type-v LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V draft_type_v
    -fa, --flash-attn on|off|auto  Flash attention; auto: where the device computes it.
        also: LLAMA_ARG_FLASH_ATTN
    -b, --batch-size N  Most tokens per call of llama.cpp; a larger -ub is lowered to it.
        also: LLAMA_ARG_BATCH n_batch
    -ub, --ubatch-size N  Tokens of a prompt that are computed at once: more are faster and take more memory.
        also: LLAMA_ARG_UBATCH n_ubatch
    -tb, --threads-batch N  CPU threads for prompts and for the verification of drafts; 0: as -t.
        also: LLAMA_ARG_THREADS_BATCH n_threads_batch
    --mlock  Lock the model in memory, so that the system does not page it out; a line says what is not locked.
        also: LLAMA_ARG_MLOCK
    --mmap/--no-mmap  Map the file, or read it into memory of the program. Default: map it.
        also: LLAMA_ARG_MMAP
    -lm, --load-mode auto|none|mmap|mlock|mmap+mlock|dio  How the file is loaded, in one option: as --mmap and --mlock
        say, or past the system's file cache (dio). Default: auto.
        also: LLAMA_ARG_LOAD_MODE mode
    -ot, --override-tensor PATTERN=BUFFER,...  Keep the tensors whose names match a regular expression in this memory:
        CPU, or a GPU's such as CUDA0. Comes before -ncmoe and --cpu-moe; the expert cache serves the experts that
        stay in host memory.
        also: LLAMA_ARG_OVERRIDE_TENSOR overrides
    --lora FILE,...  LoRA adapter in GGUF format, or several. An adapter of experts switches the expert cache off.
    --lora-scaled FILE:SCALE,...  LoRA adapter and how strongly it acts, or several.
    --rope-scaling none|linear|yarn  How positions are scaled for contexts beyond the trained one. Default: as the
        file says.
        also: LLAMA_ARG_ROPE_SCALING_TYPE scaling
    --rope-scale N  Expands the context by this factor: 1 / --rope-freq-scale.
        also: LLAMA_ARG_ROPE_SCALE
    --rope-freq-base N  Base frequency of RoPE. Default: the file's.
        also: LLAMA_ARG_ROPE_FREQ_BASE freq_base
    --rope-freq-scale N  Scale of RoPE's frequencies. Default: the file's.
        also: LLAMA_ARG_ROPE_FREQ_SCALE freq_scale
    --yarn-orig-ctx N  YaRN: context that the model was trained with, in tokens. Default: the file's.
        also: LLAMA_ARG_YARN_ORIG_CTX
    --yarn-ext-factor X  YaRN: mix of extrapolation, 0: interpolation only. Default: the file's.
        also: LLAMA_ARG_YARN_EXT_FACTOR
    --yarn-attn-factor X  YaRN: scale of attention's magnitude. Default: the file's.
        also: LLAMA_ARG_YARN_ATTN_FACTOR
    --yarn-beta-slow X  YaRN: high correction dimension. Default: the file's.
        also: LLAMA_ARG_YARN_BETA_SLOW
    --yarn-beta-fast X  YaRN: low correction dimension. Default: the file's.
        also: LLAMA_ARG_YARN_BETA_FAST
    [Expert placement]
    * --ram SIZE|auto|off  Memory for experts, of a model that is larger than the memory: they are loaded from the file
        as they are needed; next to a GPU, those that are not on it. auto: all free memory, if the file (its part in
        host memory) does not fit there; off: llama.cpp maps the file.
    --no-warm-start  Experts in RAM: do not load those first that earlier runs used most, and keep nothing of this
        run.
        also: warm_start
    --no-pin  Next to a GPU: do not pin the file's experts in RAM. Where that has room for them, they are pinned, so
        that the GPU reads them itself; else threads copy them.
        also: pins_files
    --vram SIZE  Memory of the device for experts, for instance 6GB or 512MiB. Default: what is free, minus a reserve.
        also: vram_bytes
    * --cache-ratio R  Share of all expert bytes that the device holds, 0 to 1. Default for the emulated device: 0.17.
    * --policy NAME  Policy that decides which experts the device holds: {", ".join([*POLICIES][:-1])} or
        none.
    --ablate NAME  Switch a part of the policy off (MoE-SpAc, Table 4): no-spec-ue, no-ada-bc, no-het-wb, no-prefetch,
        no-evict or no-sd. May be given several times, or as a list separated by commas.
        also: ablations
    -K, --utility-cap K  Highest utility that a policy gives an expert (K).
    --forgetting L  Forgetting factor of spac-paper's boundaries (lambda), 0 to 1.
    --prefill-path auto|cpu|resident|stream  How prompts are computed: as without a cache, with resident experts on
        the device, with all experts streamed through the device, or auto: the fastest as measured.
        also: prefill
    --no-calibrate  Do not measure machine and device on first use; earlier measurements are still used.
        also: calibrate
    [Expert budget (lossy)]
    * --expert-budget B|auto|off  Verify drafts with at most B experts per layer (MoE-Spec). Lossy: faster, but answers
        may differ from the model's own; prompts and single tokens are computed exactly. auto: the fastest budget whose
        score on a calibration set stays within one standard deviation (docs/lab/expert-budget.md). Default: off.
        set: budget expert_budget: experts per layer that verify drafts (lossy)
    --budget-ranking picks|router  Which experts stay: those with the highest routing probability over the batch, of
        the experts that its tokens select (picks) or of all experts (router: the paper's). Default: picks.
    --budget-policy substitution|truncation  What a token gets whose expert is left out: the best of the others
        (substitution), or nothing in its place (truncation). Default: substitution.
    [Output]
    * -o, --output text|json  Print text or JSON; sizes in bytes, times in s.
    --verbose  Show llama.cpp's log on standard error, and no live panel or progress bar.
        also: -v --log-verbose
    * --plot FILE  Draw the result (.png, .svg or .pdf). bench: pair hits and speed over the cache ratio, a line per
        policy, quality over speed with --expert-budget, or speed over lists of -p, -d, -t and others; profile:
        activations and prediction accuracy, step by step for one layer.
    * --trace-out FILE.npz  Write the routing of every token, rejected drafts included (docs/lab/traces.md).
    """,
    model={"parser": _model, "names": models},
    model_draft={"names": drafts},
    draft_max={"kind": str, "convert": _draft_length},
    hf_token={"callback": lambda token: _set_variable("HF_TOKEN", token)},
    offline={"callback": lambda offline: _set_variable("HF_HUB_OFFLINE", offline)},
    verbose={"callback": _show_log},
    dataset={"names": datasets},
    limit={"least": 0, "words": "0 (all) or more"},
    n_gpu_layers={"parser": gpu_layers},
    device={"names": devices},
    backend={"callback": _name_backends},
    cache_type_k={"convert": str.lower},
    cache_type_v={"convert": str.lower},
    cache_type_k_draft={"convert": str.lower},
    cache_type_v_draft={"convert": str.lower},
    flash_attn={"kind": str, "convert": lambda text: SWITCH.get(text.lower(), text)},
    load_mode={"kind": str},
    override_tensor={
        "kind": list[str],
        "convert": lambda texts: tuple(override for text in texts for override in TensorOverride.parse(text)),
    },
    lora={"kind": list[str], "convert": _adapters},
    lora_scaled={"kind": list[str], "convert": _scaled_adapters},
    rope_scaling={"kind": str},
    expert_budget={"kind": str, "convert": parse_budget},
    read={_ram: "ram", memory_size: "vram"},
    policy={"names": lambda: POLICIES},
    ablate={"kind": list[str], "convert": ablations},
    no_pin={"kind": bool, "convert": not_},
    output={"parser": output_parser("text|json")},
)
declare(
    "--draft-max LIST  Tokens per draft (gamma); 0: no speculation. Several, separated by commas, are compared.",
    "fit simulate measured",
    read={integers: "draft_max"},
)
