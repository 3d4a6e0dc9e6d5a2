"""Options and commands of llama.cpp and ollama that moeedge spells otherwise, always has, or does not have.

What moeedge has under the same name is declared in options.py, and further spellings of an option stand in its own
declaration (`also`). A declared option comes before a row here. Tests and the reference use the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Instead:
    """Another spelling with other words: `words` replace the option, "{}" in them is its value.

    by_value: the words for single values, in place of `words`. env: llama.cpp's variable for it. hint: what to write
    in place of a value that has no words.
    """

    words: str = ""
    by_value: Mapping[str, str] = field(default_factory=dict)
    env: str = ""
    hint: str = "-md chooses the source of drafts."

    def arguments(self, value: str) -> list[str] | None:
        """The arguments that say the same; None for a value that has none."""
        found = self.by_value.get(value, self.words)
        return [word.replace("{}", value) for word in found.split()] or None


@dataclass(frozen=True)
class Already:
    """What moeedge always does: the option is taken and changes nothing.

    values: those that it may have; empty: it has none.
    """

    meaning: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ignored:
    """What moeedge lacks and answers do not depend on: the option is taken, and a line says why it has no effect.

    same: values that say what moeedge does, without a line.
    """

    reason: str
    same: tuple[str, ...] = ()
    has_value: bool = True


@dataclass(frozen=True)
class Sets:
    """The option sets an environment variable of the process: by value, the variable and its content."""

    by_value: Mapping[str, tuple[str, str]]
    default: str = ""  # the value where the option is written without one; empty: it must have one


@dataclass(frozen=True)
class Refused:
    """What moeedge does not do: one sentence, and what to write."""

    message: str
    hint: str = ""


# llama.cpp's values of a switch, by the word for them here
SWITCH = {
    **dict.fromkeys(("on", "enabled", "true", "1"), "on"),
    **dict.fromkeys(("off", "disabled", "false", "0"), "off"),
    **dict.fromkeys(("auto", "-1"), "auto"),
}
_SERVER = Refused("moeedge is not a server.", "Ask with moeedge chat -p TEXT -o json.")
_ONE_GPU = Refused("moeedge computes on one GPU.", "Choose it with -dev NAME (moeedge devices).")
_POLLING = Ignored("moeedge decides how long idle threads wait")
_PINNING = Refused("moeedge does not choose processors or priorities.", "Start it with taskset, numactl or nice.")
_ROPE = Refused("moeedge has no self-extend.", "--rope-scaling yarn and --rope-scale N lengthen the context.")
_DRAFT_PLACE = Ignored("a draft model shares -t, -c, -ngl, -ncmoe and -dev with the model")
_TEXT_ONLY = Refused("moeedge answers text only.", "Use llama-mtmd-cli of llama.cpp for pictures and sound.")
_TEMPLATE = Refused("the model's chat template decides what surrounds a message.", "--raw leaves it out.")
_PROMPT_CACHE = Refused(
    "the prompt's state is not kept in a file.", "/save FILE keeps a chat, /load FILE goes on with it."
)
_NGRAMS = Refused("moeedge's n-grams have no options.", "-md ngram drafts from the text so far.")
_KERNELS = Refused("moeedge chooses kernels and places of weights itself.", "Leave it out.")

# all spellings of a row, and what they mean
Row = Instead | Already | Ignored | Sets | Refused
OPTIONS: dict[str, Row] = {
    "-hf, -hfr, --hf-repo": Instead("-m hf:{}"),
    "-hfd, -hfrd, --hf-repo-draft, --spec-draft-hf": Instead("-md hf:{}"),
    "--rpc, -rpc": Instead("-dev rpc://{}", env="LLAMA_ARG_RPC"),
    "-no-cnv, --no-conversation": Instead("--raw"),
    "--usage": Instead("--help"),
    "--reasoning-budget": Instead(
        by_value={"0": "--think off", "-1": "--think auto"},
        env="LLAMA_ARG_THINK_BUDGET",
        hint="--think low makes some models think less.",
    ),
    "--reasoning-format": Instead(
        by_value={
            "none": "--show-thinking",
            **dict.fromkeys(("auto", "deepseek", "deepseek-legacy"), "--think auto"),
        },
        env="LLAMA_ARG_THINK",
        hint="--show-thinking and --hide-thinking say what is shown.",
    ),
    "--hidethinking": Instead("--hide-thinking"),
    "--nowordwrap": Instead("--plain"),
    "--spec-type": Instead(
        by_value={
            "none": "-md none",
            "draft-simple": "-md auto",
            "draft-mtp": "-md mtp",
            **dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "-md ngram"),
        },
        env="LLAMA_ARG_SPEC_TYPE",
    ),
    "-lv, --verbosity, --log-verbosity": Instead(
        by_value={**dict.fromkeys("012", "--log-disable"), **dict.fromkeys("345", "--verbose")},
        env="LLAMA_ARG_LOG_VERBOSITY",
    ),
    "-co, --color": Sets(
        {"auto": ("", ""), "on": ("FORCE_COLOR", "1"), "off": ("NO_COLOR", "1")},
        default="on",
    ),
    "--simple-io": Sets({"": ("TERM", "dumb")}),
    "-cnv, --conversation": Already("chat is a conversation, unless --raw is given"),
    "-if, --interactive-first": Already("without -p, chat waits for your message first"),
    "-mli, --multiline-input": Already('a message between """ and """ may have several lines'),
    "--no-display-prompt": Already("the answer alone goes to standard output"),
    "--jinja": Already("chat templates are rendered with Jinja"),
    "--log-disable": Already("llama.cpp's log is shown with --verbose only"),
    "--show-timings, --perf": Already("figures follow each answer, on standard error"),
    "--no-warmup": Already("a chat does not warm up: the first answer is computed at once"),
    "-fit, --fit": Already("what fits is placed on the GPU; moeedge plan shows it", values=("on",)),
    "--no-mmproj, --no-mmproj-auto": Already("pictures are not read"),
    "-np, --parallel": Ignored(
        "a chat is one conversation; moeedge bench --parallel 1,2,4 has several texts", same=("1",)
    ),
    "--list-devices": Refused("that is a command here.", "Run moeedge devices."),
    "-cl, --cache-list": Refused("that is a command here.", "Run moeedge list."),
    "--completion-bash": Refused("that has another name here.", "Run moeedge --install-completion bash."),
    "-hff, --hf-file": Refused("it names a file of the repository that -hf names.", "Give -hf OWNER/REPO, too."),
    "-dr, --docker-repo": Refused(
        "moeedge does not download from Docker's registry.",
        "Take one from Hugging Face: -hf OWNER/REPO:QUANT.",
    ),
    "-bf, --binary-file": Refused("a prompt is text in UTF-8.", "Give it with -f FILE."),
    "--spec-draft-n-min, --draft-min, --draft-n-min": Ignored(
        "short drafts are verified as well, and --draft-p-min P ends improbable ones", same=("0",)
    ),
    "--spec-draft-p-split, --draft-p-split": Refused("drafts are chains here, which do not split.", "Leave it out."),
    "-td, --threads-draft, --spec-draft-threads": _DRAFT_PLACE,
    "-tbd, --threads-batch-draft, --spec-draft-threads-batch": _DRAFT_PLACE,
    "-devd, --device-draft, --spec-draft-device": _DRAFT_PLACE,
    "-ngld, --gpu-layers-draft, --n-gpu-layers-draft, --spec-draft-ngl": _DRAFT_PLACE,
    "-otd, --override-tensor-draft, --spec-draft-override-tensor": _DRAFT_PLACE,
    "-cmoed, --cpu-moe-draft, --spec-draft-cpu-moe": replace(_DRAFT_PLACE, has_value=False),
    "-ncmoed, --n-cpu-moe-draft, --spec-draft-n-cpu-moe, --spec-draft-ncmoe": _DRAFT_PLACE,
    "-cd, --ctx-size-draft": _DRAFT_PLACE,
    "-lcs, --lookup-cache-static, -lcd, --lookup-cache-dynamic": _NGRAMS,
    "--spec-ngram-size-n, --spec-ngram-size-m, --spec-ngram-min-hits": _NGRAMS,
    "--spec-ngram-mod-n-min, --spec-ngram-mod-n-max, --spec-ngram-mod-n-match": _NGRAMS,
    "-sm, --split-mode": Ignored("moeedge computes on one GPU", same=("none",)),
    "-mmp": Instead(by_value={"0": "--no-mmap", "1": "--mmap"}),
    "-dio, --direct-io": Instead(
        by_value={"0": "--load-mode mmap", "1": "--load-mode dio"}, hint="--load-mode has them."
    ),
    "--progress": Already("bench shows its progress on standard error"),
    "-oe, --output-err": Refused(
        "results go to standard output, progress to standard error.", "Write for instance bench -o json > FILE."
    ),
    "-embd": Refused("bench measures prompts and decoding, not embeddings.", "Leave it out."),
    "-ts, --tensor-split, -mg, --main-gpu": _ONE_GPU,
    "-fitt, --fit-target, -fitc, --fit-ctx": Refused(
        "moeedge sizes what it places on the GPU itself.", "--vram SIZE limits the experts there, -c N the context."
    ),
    "-C, --cpu-mask, -Cr, --cpu-range, --cpu-strict, --prio, --numa": _PINNING,
    "-Cb, --cpu-mask-batch, -Crb, --cpu-range-batch, --cpu-strict-batch, --prio-batch": _PINNING,
    "--poll, --poll-batch": _POLLING,
    "-gan, --grp-attn-n, -gaw, --grp-attn-w": _ROPE,
    "--override-kv": Refused("moeedge takes a model's facts as its file has them.", "Correct the file."),
    "--check-tensors": Refused("moeedge pull checks files by their SHA-256.", "Leave it out."),
    "--control-vector, --control-vector-scaled, --control-vector-layer-range": Refused(
        "moeedge applies no control vectors.", "Leave it out."
    ),
    "--repack, -nr, --no-repack, --no-host, -kvo, --kv-offload, -nkvo, --no-kv-offload": _KERNELS,
    "--op-offload, --no-op-offload, -nopo, -ncffn, --n-cpu-ffn": _KERNELS,
    "-dt, --defrag-thold, -kvu, --kv-unified, -no-kvu, --no-kv-unified, --swa-full": _KERNELS,
    "-ctxcp, --ctx-checkpoints, --swa-checkpoints, -cram, --cache-ram": _KERNELS,
    "--keep": Ignored("where the context is full, --context-shift drops the older half", same=("0",)),
    "--no-jinja": Refused(
        "chat templates are rendered with Jinja.", "--chat-template NAME takes one of llama.cpp's without, --raw none."
    ),
    "--mirostat, --mirostat-lr, --mirostat-ent, --adaptive-target, --adaptive-decay": Refused(
        "moeedge does not have this sampler.", "Use --top-p, --min-p or --typical."
    ),
    "-bs, --backend-sampling": Refused("tokens are drawn on the CPU.", "Leave it out."),
    "--reasoning-budget-message": Refused("thinking is not cut off.", "--think off leaves it out."),
    "--reasoning-preserve, --no-reasoning-preserve": Refused(
        "the chat template decides whether earlier thinking stays.",
        """If it has a variable for that: --chat-template-kwargs '{"NAME": true}'.""",
    ),
    "--skip-chat-parsing, --no-skip-chat-parsing": Refused("answers are not parsed.", "Leave it out."),
    "-sp, --special": Refused("control tokens are not printed.", "--raw shows the text that follows."),
    "--display-prompt": Refused("the prompt is not printed again.", "Leave it out."),
    "--verbose-prompt, -ptc, --print-token-count": Refused("no such line is printed.", "-o json counts the tokens."),
    "--in-prefix, --in-suffix, --in-prefix-bos": _TEMPLATE,
    "--prompt-cache, --prompt-cache-all, --prompt-cache-ro": _PROMPT_CACHE,
    "-mm, --mmproj, -mmu, --mmproj-url, --image, --audio, --video": _TEXT_ONLY,
    "--log-file": Refused("the log goes to standard error.", "Write --verbose 2> FILE."),
    "--log-prefix, --log-timestamps, --log-colors, --log-jsonl": Refused("the log has one form.", "Leave it out."),
    "--no-perf, --no-show-timings": Refused("figures cannot be left out alone.", "-q shows the answer alone."),
    "--server-base, --host, --port, --path, --api-key, --api-key-file, --alias, -a": _SERVER,
    "--metrics, --slots, --props, --embedding, --embeddings, --rerank, --reranking, --timeout, -to": _SERVER,
    "-cb, --cont-batching, -nocb, --no-cont-batching, --threads-http, --ui, --webui, --no-webui": _SERVER,
    "--cache-prompt, --no-cache-prompt, --cache-reuse, --slot-save-path, --models-dir, --tools": _SERVER,
    "--budget-file, --budget-layers, --save-ranking": Refused(
        "experts are ranked by the router's values alone.", "moeedge lab replay also ranks them by use."
    ),
    "--budget-prefer-resident": Refused("experts on the device are not preferred: it did not pay.", "Leave it out."),
    "--budget-analysis": Refused("it has a command of its own.", "Run moeedge lab budget."),
    "--keepalive": Refused("a model stays loaded as long as its chat, and no longer.", "Leave it out."),
    "--insecure": Refused("downloads are encrypted and checked.", "HF_ENDPOINT names another server."),
    "--modelfile, --parameters, --system, --template, --license": Refused(
        "moeedge has no model files of ollama.", "moeedge show NAME prints all facts."
    ),
}

# ollama's and llama.cpp's words in place of a command, and the command
COMMAND_NAMES = {"run": "chat", "ls": "list", "cli": "chat", "download": "pull"}

COMMANDS: dict[str, Refused] = {
    **dict.fromkeys(
        ("serve", "server"),
        Refused("moeedge is not a server.", "Run moeedge chat, or llama-server of llama.cpp for one."),
    ),
    "create": Refused("moeedge needs no model file of its own.", "Give a GGUF file with -m FILE (docs/models.md)."),
    **dict.fromkeys(
        ("push", "signin", "signout"), Refused("moeedge uploads nothing.", "Use hf, the program of Hugging Face.")
    ),
    "cp": Refused("moeedge does not copy models.", "Copy the file; moeedge list -o json prints where it is."),
    "stop": Refused("A model is unloaded when its chat ends.", "Leave it with /exit; moeedge ps lists what runs."),
    "quantize": Refused("moeedge does not quantize.", "Use llama-quantize of llama.cpp."),
    "perplexity": Refused("Perplexity is part of bench.", "Run moeedge bench --perplexity."),
    "completion": Refused("Completion has a command of its own.", "Run moeedge --install-completion."),
}


def foreign_options() -> dict[str, Row]:
    """The rows of OPTIONS by each of their spellings."""
    return {spelling: row for spellings, row in OPTIONS.items() for spelling in spellings.split(", ")}
