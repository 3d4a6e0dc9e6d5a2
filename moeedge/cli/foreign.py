"""Options and commands of llama.cpp and ollama that moeedge spells otherwise, always has, or does not have.

What moeedge has under the same name is declared in options.py, and further spellings of an option stand in its own
declaration (`also`). A declared option comes before a row here. Tests and the reference use the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from moeedge.cli.declare import entries

Kind = Literal["means", "always", "ignored", "refused"]


@dataclass(frozen=True, kw_only=True)
class ForeignOption:
    """An option or command of another program, and its counterpart here.

    kind: "means": `text` are the words in its place; "always": moeedge does so in any case, as `text` says; "ignored":
    answers do not depend on it, and a line says that it has no effect, because of `text`; "refused": `text` is the
    error's sentence.
    """

    kind: Kind
    text: str
    hint: str = ""  # what to write in its place, or in place of a value that has no words
    has_value: bool = False
    values: tuple[str, ...] = ()  # of "always" those that it may have, of "ignored" those that need no line
    by_value: Mapping[str, str] = field(default_factory=dict)  # of "means": the words for a value; "" for none
    variable: str = ""  # llama.cpp's in the environment, for the same

    def words(self, value: str) -> list[str]:
        """The words for this value; none: there are none."""
        return [word.replace("{}", value) for word in self.by_value.get(value, self.text).split()]


# llama.cpp's values of a switch, by the word for them here
SWITCH = {
    **dict.fromkeys(("on", "enabled", "true", "1"), "on"),
    **dict.fromkeys(("off", "disabled", "false", "0"), "off"),
    **dict.fromkeys(("auto", "-1"), "auto"),
}


def _rows(table: str) -> dict[str, ForeignOption]:
    """The rows of a table, by their spellings.

    A heading is a kind. A line has the spellings, then for "always" and "ignored" the values "on", "0|N" (all, 0 is the
    same), after two blanks the text, and after "also:" the variable. Words of "means" depend on values in
    "1/on = WORDS; 0 = WORDS; HINT"; "on/" takes no value as well; words "NAME=VALUE" set the environment. A hint
    follows the first sentence of "refused".
    """
    rows = {}
    for kind, names, text, further in entries(table):
        *spellings, last = names.split(", ")
        last, _, values = last.partition(" ")
        by_value: dict[str, str] = {}
        hint = ""
        for part in text.split("; ") if kind == "means" and " = " in text else ():
            listed, has_words, words = part.partition(" = ")
            if has_words:
                by_value |= dict.fromkeys(listed.split("/"), words)
            else:
                hint = part
        if by_value:
            text = ""
        elif kind == "refused":
            text, _, hint = text.partition(". ")
            text += "."
        rows[", ".join([*spellings, last])] = ForeignOption(
            kind=cast("Kind", kind),
            text=text,
            hint=hint,
            has_value=bool(values or by_value) or "{}" in text,
            values=tuple(value for value in values.split("|") if value not in ("", "N")),
            by_value=by_value,
            variable=further.get("also", ""),
        )
    return rows


OPTIONS = _rows(
    """
    [means]
    -hf, -hfr, --hf-repo  -m hf:{}
    -hfd, -hfrd, --hf-repo-draft, --spec-draft-hf  -md hf:{}
    --rpc, -rpc  -dev rpc://{}
        also: LLAMA_ARG_RPC
    -no-cnv, --no-conversation  --raw
    --usage  --help
    --reasoning-budget  0 = --think off; -1 = --think auto; --think low makes some models think less.
        also: LLAMA_ARG_THINK_BUDGET
    --reasoning-format  none = --show-thinking; auto/deepseek/deepseek-legacy = --think auto; --show-thinking and
        --hide-thinking say what is shown.
        also: LLAMA_ARG_THINK
    --hidethinking  --hide-thinking
    --nowordwrap  --plain
    -co, --color  auto = ; on/ = FORCE_COLOR=1; off = NO_COLOR=1
    --simple-io  TERM=dumb
    --spec-type  none = -md none; draft-simple = -md auto; draft-mtp = -md mtp;
        ngram-simple/ngram-map-k/ngram-map-k4v/ngram-mod/ngram-cache = -md ngram; -md chooses the source of drafts.
        also: LLAMA_ARG_SPEC_TYPE
    -lv, --verbosity, --log-verbosity  0/1/2 = --log-disable; 3/4/5 = --verbose
        also: LLAMA_ARG_LOG_VERBOSITY
    -mmp  0 = --no-mmap; 1 = --mmap
    -dio, --direct-io  0 = --load-mode mmap; 1 = --load-mode dio; --load-mode has them.
    [always]
    -cnv, --conversation  chat is a conversation, unless --raw is given
    -if, --interactive-first  without -p, chat waits for your message first
    -mli, --multiline-input  three quotation marks begin and end a message of several lines
    --no-display-prompt  the answer alone goes to standard output
    --jinja  chat templates are rendered with Jinja
    --log-disable  llama.cpp's log is shown with --verbose only
    --show-timings, --perf  figures follow each answer, on standard error
    --no-warmup  a chat does not warm up: the first answer is computed at once
    -fit, --fit on  what fits is placed on the GPU; moeedge plan shows it
    --no-mmproj, --no-mmproj-auto  pictures are not read
    --progress  bench shows its progress on standard error
    [ignored]
    -np, --parallel 1|N  a chat is one conversation; moeedge bench --parallel 1,2,4 has several texts
    --spec-draft-n-min, --draft-min, --draft-n-min 0|N  short drafts are verified as well, and --draft-p-min P ends
        improbable ones
    -td, --threads-draft, --spec-draft-threads, -tbd, --threads-batch-draft, --spec-draft-threads-batch, -devd,
        --device-draft, --spec-draft-device, -ngld, --gpu-layers-draft, --n-gpu-layers-draft, --spec-draft-ngl,
        -otd, --override-tensor-draft, --spec-draft-override-tensor, -ncmoed, --n-cpu-moe-draft,
        --spec-draft-n-cpu-moe, --spec-draft-ncmoe, -cd, --ctx-size-draft N  a draft model shares -t, -c, -ngl,
        -ncmoe and -dev with the model
    -cmoed, --cpu-moe-draft, --spec-draft-cpu-moe  a draft model shares -t, -c, -ngl, -ncmoe and -dev with the model
    -sm, --split-mode none|N  moeedge computes on one GPU
    --poll, --poll-batch N  moeedge decides how long idle threads wait
    --keep 0|N  where the context is full, --context-shift drops the older half
    [refused]
    --list-devices  that is a command here. Run moeedge devices.
    -cl, --cache-list  that is a command here. Run moeedge list.
    --completion-bash  that has another name here. Run moeedge --install-completion bash.
    -hff, --hf-file  it names a file of the repository that -hf names. Give -hf OWNER/REPO, too.
    -dr, --docker-repo  moeedge does not download from Docker's registry. Take one from Hugging Face: -hf
        OWNER/REPO:QUANT.
    -bf, --binary-file  a prompt is text in UTF-8. Give it with -f FILE.
    --spec-draft-p-split, --draft-p-split  drafts are chains here, which do not split. Leave it out.
    -lcs, --lookup-cache-static, -lcd, --lookup-cache-dynamic, --spec-ngram-size-n, --spec-ngram-size-m,
        --spec-ngram-min-hits, --spec-ngram-mod-n-min, --spec-ngram-mod-n-max, --spec-ngram-mod-n-match  moeedge's
        n-grams have no options. -md ngram drafts from the text so far.
    -oe, --output-err  results go to standard output, progress to standard error. Write for instance bench -o json >
        FILE.
    -embd  bench measures prompts and decoding, not embeddings. Leave it out.
    -ts, --tensor-split, -mg, --main-gpu  moeedge computes on one GPU. Choose it with -dev NAME (moeedge devices).
    -fitt, --fit-target, -fitc, --fit-ctx  moeedge sizes what it places on the GPU itself. --vram SIZE limits the
        experts there, -c N the context.
    -C, --cpu-mask, -Cr, --cpu-range, --cpu-strict, --prio, --numa, -Cb, --cpu-mask-batch, -Crb, --cpu-range-batch,
        --cpu-strict-batch, --prio-batch  moeedge does not choose processors or priorities. Start it with taskset,
        numactl or nice.
    -gan, --grp-attn-n, -gaw, --grp-attn-w  moeedge has no self-extend. --rope-scaling yarn and --rope-scale N
        lengthen the context.
    --override-kv  moeedge takes a model's facts as its file has them. Correct the file.
    --check-tensors  moeedge pull checks files by their SHA-256. Leave it out.
    --control-vector, --control-vector-scaled, --control-vector-layer-range  moeedge applies no control vectors.
        Leave it out.
    --repack, -nr, --no-repack, --no-host, -kvo, --kv-offload, -nkvo, --no-kv-offload, --op-offload,
        --no-op-offload, -nopo, -ncffn, --n-cpu-ffn, -dt, --defrag-thold, -kvu, --kv-unified, -no-kvu,
        --no-kv-unified, --swa-full, -ctxcp, --ctx-checkpoints, --swa-checkpoints, -cram, --cache-ram  moeedge
        chooses kernels and places of weights itself. Leave it out.
    --no-jinja  chat templates are rendered with Jinja. --chat-template NAME takes one of llama.cpp's without, --raw
        none.
    --mirostat, --mirostat-lr, --mirostat-ent, --adaptive-target, --adaptive-decay  moeedge does not have this
        sampler. Use --top-p, --min-p or --typical.
    -bs, --backend-sampling  tokens are drawn on the CPU. Leave it out.
    --reasoning-budget-message  thinking is not cut off. --think off leaves it out.
    --reasoning-preserve, --no-reasoning-preserve  the chat template decides whether earlier thinking stays. If it
        has a variable for that: --chat-template-kwargs '{"NAME": true}'.
    --skip-chat-parsing, --no-skip-chat-parsing  answers are not parsed. Leave it out.
    -sp, --special  control tokens are not printed. --raw shows the text that follows.
    --display-prompt  the prompt is not printed again. Leave it out.
    --verbose-prompt, -ptc, --print-token-count  no such line is printed. -o json counts the tokens.
    --in-prefix, --in-suffix, --in-prefix-bos  the model's chat template decides what surrounds a message. --raw
        leaves it out.
    --prompt-cache, --prompt-cache-all, --prompt-cache-ro  the prompt's state is not kept in a file. /save FILE
        keeps a chat, /load FILE goes on with it.
    -mm, --mmproj, -mmu, --mmproj-url, --image, --audio, --video  moeedge answers text only. Use llama-mtmd-cli of
        llama.cpp for pictures and sound.
    --log-file  the log goes to standard error. Write --verbose 2> FILE.
    --log-prefix, --log-timestamps, --log-colors, --log-jsonl  the log has one form. Leave it out.
    --no-perf, --no-show-timings  figures cannot be left out alone. -q shows the answer alone.
    --server-base, --host, --port, --path, --api-key, --api-key-file, --alias, -a, --metrics, --slots, --props,
        --embedding, --embeddings, --rerank, --reranking, --timeout, -to, -cb, --cont-batching, -nocb,
        --no-cont-batching, --threads-http, --ui, --webui, --no-webui, --cache-prompt, --no-cache-prompt,
        --cache-reuse, --slot-save-path, --models-dir, --tools  moeedge is not a server. Ask with moeedge chat -p
        TEXT -o json.
    --budget-file, --budget-layers, --save-ranking  experts are ranked by the router's values alone. moeedge lab
        replay also ranks them by use.
    --budget-prefer-resident  experts on the device are not preferred: it did not pay. Leave it out.
    --budget-analysis  it has a command of its own. Run moeedge lab budget.
    --keepalive  a model stays loaded as long as its chat, and no longer. Leave it out.
    --insecure  downloads are encrypted and checked. HF_ENDPOINT names another server.
    --modelfile, --parameters, --template, --license  moeedge has no model files of ollama. moeedge show NAME prints
        all facts.
    """
)


def foreign_options(rows: Mapping[str, ForeignOption] = OPTIONS) -> dict[str, ForeignOption]:
    """The rows by each of their spellings."""
    return {spelling: row for spellings, row in rows.items() for spelling in spellings.split(", ")}


# of the commands that take a model as a word, and of those that print JSON
NAME_OPTIONS = _rows("[means]\n-m, --model  {}\n-hf, -hfr, --hf-repo  hf:{}")
JSON_OPTIONS = _rows("[means]\n--json  -o json")

# ollama's and llama.cpp's words in place of a command, and the command
COMMAND_NAMES = {"run": "chat", "ls": "list", "cli": "chat", "download": "pull"}
# what has no command here
COMMANDS = foreign_options(
    _rows("""
    [refused]
    serve, server  moeedge is not a server. Run moeedge chat, or llama-server of llama.cpp for one.
    create  moeedge needs no model file of its own. Give a GGUF file with -m FILE (docs/models.md).
    push, signin, signout  moeedge uploads nothing. Use hf, the program of Hugging Face.
    cp  moeedge does not copy models. Copy the file; moeedge list -o json prints where it is.
    stop  A model is unloaded when its chat ends. Leave it with /exit; moeedge ps lists what runs.
    quantize  moeedge does not quantize. Use llama-quantize of llama.cpp.
    perplexity  Perplexity is part of bench. Run moeedge bench --perplexity.
    completion  Completion has a command of its own. Run moeedge --install-completion.
    """)
)
