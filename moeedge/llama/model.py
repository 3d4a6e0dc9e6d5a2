"""A loaded model: its vocabulary and its chat template."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import llama_cpp.llama_cpp as lib

from moeedge import native
from moeedge.errors import InputError, ModelFileError, MoeedgeError
from moeedge.hardware.devices import Storage
from moeedge.llama import gguf_file, library
from moeedge.llama.dense_weights import DenseWeights, SplitWeights
from moeedge.llama.model_info import DAMAGED, ModelInfo, check_numbers, read_info, read_metadata
from moeedge.llama.reasoning import MODEL_TEMPLATE, ReasoningTags, TemplateChoice, find_reasoning_tags
from moeedge.llama.settings import LoadSettings, LoraAdapter
from moeedge.llama.text import BuiltinFormat, ChatFormat, builtin_names
from moeedge.native.backends import DRY_RUN_GPU, dry_run_gpu
from moeedge.native.library import errors_for_aborts
from moeedge.native.mapping import map_lazily
from moeedge.run import Closing

# moeedge: our backend computes; stock: the same process and loop, but our backend claims no operations
Mode = Literal["moeedge", "stock"]

# weights, biases and scales of routed experts, also merged ones (chexps); shared experts (shexp) stay with their layer
_EXPERT_TENSORS = r"ffn_(\w+_)?(up|gate|down)_(ch)?exps\."

_CONTROL_ATTRIBUTES = 1 << 0 | 1 << 3  # LLAMA_TOKEN_ATTR_UNKNOWN and _CONTROL, which parse_special finds in a text
_TOKENIZE, _TO_PIECE = (ctypes.cast(call, ctypes.c_void_p) for call in (lib.llama_tokenize, lib.llama_token_to_piece))
_TEXT_THREW = -(1 << 31)  # MOEEDGE_TEXT_THREW
HOST = "CPU"  # ggml's name of host memory
# with a recurrent state that llama.cpp can take back (llm_arch_supports_rs_rollback); two of them are tested
_SNAPSHOT_ARCHITECTURES = frozenset(
    {
        *("bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"),
        *("qwen35", "qwen35moe", "qwen4exp"),
    }
)


class _BufferOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


@dataclass(eq=False, repr=False, kw_only=True)
class Model(Closing):
    """llama.cpp's model and vocabulary, made by `load`."""

    path: Path
    handle: Any  # llama_model *
    info: ModelInfo
    gpu: int | None  # ggml_backend_dev_t of the first GPU in use; None: all layers are computed on the CPU
    host_expert_layers: tuple[int, ...]  # whose experts are in host memory: our backend computes and sees their routing
    storage: Storage  # of the weights in host memory
    header_only: bool  # no weights; its contexts allocate nothing
    dense: DenseWeights | None  # None: the experts are loaded like all weights, or nothing is (header_only)
    has_head: bool  # the blocks that predict further tokens are loaded
    settings: LoadSettings
    warning: str  # of llama.cpp, about locked memory; empty: none

    def __post_init__(self) -> None:
        self.uses_gpu = self.gpu is not None  # llama.cpp computes large batches on a GPU even without layers there
        self.vocab = lib.llama_model_get_vocab(self.handle)  # llama_vocab *
        self._adapters: dict[Path, Any] = {}  # llama_adapter_lora *, freed with the model
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._eog: dict[int, bool] = {}
        self._chat_formats: dict[str, ChatFormat | BuiltinFormat] = {}  # by the source of the template
        self._reasoning: dict[str, ReasoningTags | None] = {}

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        n_gpu_layers: int = 0,
        device: str = "auto",
        settings: LoadSettings | None = None,
        experts_on_cpu: bool = False,
        n_cpu_moe: int | None = None,
        repack: bool = True,
        header_only: bool = False,
        storage: Storage = "loaded",
        n_expert_used: int | None = None,
        head: bool = False,
    ) -> Model:
        """Loads a GGUF file, or all parts of a split one given the first.

        n_gpu_layers: negative means all.
        device: the value of -dev; see `library.device_list`. "none" and the CPU also keep large batches off all GPUs.
        settings: of llama.cpp's loader. Its overrides come before what experts_on_cpu and n_cpu_moe say.
        experts_on_cpu: layers on a GPU keep their experts in host memory, repacked for the CPU if it supports that.
        n_cpu_moe: with experts_on_cpu, only the first so many layers do (llama.cpp's --n-cpu-moe); default: all.
        repack: False: these experts are stored as in llama.cpp's programs, next to a GPU mostly without repacking.
        header_only: shape and vocabulary without weights; such a model cannot compute.
        storage: of the weights in host memory. "on demand" maps the file without reading the experts, for a cache that
            reads them itself; the dense weights get memory of their own (`dense_weights`).
        n_expert_used: experts per token, at most the file's number, for measuring.
        head: also loads the blocks that predict further tokens (MTP), if the file has any.
        Raises ModelFileError for a missing, truncated or non-GGUF file and for one that llama.cpp cannot load,
        InputError for an override with a type of memory that this machine does not have.
        """
        library.start()
        settings = settings or LoadSettings()
        summary = gguf_file.read_summary(path)
        has_head = head and bool(summary.head_layers)
        is_lazy = storage == "on demand" and not header_only
        devices = library.device_list(device)
        uses_gpu = devices[0] is not None
        n_moved = n_cpu_moe if experts_on_cpu else 0  # layers of which a GPU gets all but the experts; None: all
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers, parameters.no_alloc, parameters.load_mtp = n_gpu_layers, header_only, has_head
        parameters.devices = ctypes.cast(devices, ctypes.c_void_p)
        parameters.use_extra_bufts = storage == "loaded"  # repacked weights cannot be paged out to the file
        # otherwise llama.cpp prefers the GPU's pinned buffers for the CPU's tensors, whose experts are not repacked and
        # compute 1.7 times slower
        parameters.no_host = experts_on_cpu and storage == "loaded" and repack
        places = [(pattern.encode(), buffer_type(name, device)) for pattern, name in settings.overrides]
        if experts_on_cpu:
            places.append((_experts_of_first(n_cpu_moe, summary.expert_layers), buffer_type(HOST)))
        overrides = (_BufferOverride * (len(places) + 1))(*(_BufferOverride(*place) for place in places))
        if places:
            parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        if n_expert_used is not None:
            parameters.kv_overrides = _override_experts_used(path, n_expert_used)
        # llama.cpp maps no weights that it does not load
        mode = "mmap" if is_lazy else "none" if header_only else settings.mode.replace("dio", "direct_io")
        parameters.load_mode = getattr(lib, f"LLAMA_LOAD_MODE_{mode.upper().replace('+', '_')}")
        weights = SplitWeights.read(path, n_layers=min(summary.head_layers) if has_head else None) if is_lazy else None
        n_host = _n_host_layers(weights.n_layers, n_gpu_layers) if weights and uses_gpu else None
        if weights and uses_gpu:  # llama.cpp copies from the mapping what a GPU gets
            weights.read_ahead(_most(n_host, n_moved))
        mapped_before = weights.mapped() if weights else frozenset()
        library.clear_errors()
        with errors_for_aborts(), map_lazily() if is_lazy else nullcontext():
            handle = lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not handle:
            reason = library.first_error()
            raise ModelFileError(f"llama.cpp cannot load {path}: {reason}.", "Show its complete log with --verbose.")
        info = read_info(handle, summary, path)
        if n_expert_used is not None:  # llama.cpp shows the file's metadata without overrides
            info = replace(info, n_expert_used=n_expert_used)
        try:
            check_numbers(handle, info.architecture, path)
            dense = weights.keep_dense(mapped_before, n_host_layers=n_host) if weights else None
        except BaseException:
            lib.llama_model_free(handle)
            raise
        n_all = info.n_layers + lib.llama_model_n_layer_nextn(handle)
        n_in_ram = _most(_n_host_layers(n_all, n_gpu_layers), n_moved) if uses_gpu else None
        warning = library.first_error("")
        return cls(
            path=path,
            handle=handle,
            info=info,
            gpu=devices[0],
            host_expert_layers=_in_host_memory(path, info, n_in_ram, settings, device),
            storage=storage,
            header_only=header_only,
            dense=dense,
            has_head=has_head,
            settings=settings,
            warning=warning if "mlock" in warning else "",
        )

    @property
    def n_whole_layers(self) -> int:
        """Layers with experts that are entirely on a GPU."""
        return self.info.n_expert_layers - len(self.host_expert_layers)

    @property
    def can_roll_back(self) -> bool:
        """Whether the last positions can be dropped from memory; a recurrent state cannot forget tokens."""
        return not (lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))

    @property
    def keeps_snapshots(self) -> bool:
        """Whether llama.cpp can keep the recurrent states after a batch's last tokens, to go back to one of them."""
        return not self.can_roll_back and self.info.architecture in _SNAPSHOT_ARCHITECTURES

    @property
    def can_reject_drafts(self) -> bool:
        """Whether the drafts of the last batch can be taken back."""
        return self.can_roll_back or self.keeps_snapshots

    def metadata(self, key: str) -> str | None:
        """Returns a metadata value as text; None without the key."""
        return read_metadata(self.handle, key)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Returns token ids. add_special: BOS/EOS if the model uses them; parse_special: <|...|> as special tokens.

        Raises InputError for a lone surrogate, ModelFileError for a vocabulary that is damaged.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError:
            what = "The prompt has half of a surrogate pair, which is no character."
            raise InputError(what, "Correct its text, or the chat template that writes it.") from None
        room, count = 0, -len(data) - 2
        while _TEXT_THREW < count < -room:
            room = -count
            buffer = (lib.llama_token * room)()
            count = native.load().moeedge_tokenize(
                _TOKENIZE, self.vocab, data, len(data), buffer, room, add_special, parse_special
            )
        if count < 0:
            raise self._unusable_vocabulary(f"tokenize a text of {len(data):,} bytes")
        tokens = list(buffer[:count])
        if not all(0 <= token < self.info.n_vocab for token in tokens):  # of a byte that has none
            raise ModelFileError(f"{self.path.name}'s vocabulary has no token for a part of the text.", DAMAGED)
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes of one token, possibly part of a character; control tokens are empty unless `special`."""
        key = (token, special)
        piece = self._pieces.get(key)
        if piece is None:
            count = -64
            while _TEXT_THREW < count < 0:  # the room that it takes
                buffer = ctypes.create_string_buffer(-count)
                count = native.load().moeedge_piece(_TO_PIECE, self.vocab, token, buffer, len(buffer), special)
            if count < 0:
                raise self._unusable_vocabulary(f"spell token {token}")
            piece = self._pieces[key] = buffer.raw[:count]
        return piece

    def _unusable_vocabulary(self, what: str) -> ModelFileError:
        reason = native.load().moeedge_last_error().decode("utf-8", "replace").rstrip(".")
        if reason == "Out of memory":
            raise MemoryError
        return ModelFileError(f"llama.cpp could not {what} with {self.path.name}'s vocabulary: {reason}.", DAMAGED)

    def token_text(self, token: int) -> str:
        """Returns the vocabulary's spelling of a token, special ones included."""
        return (lib.llama_vocab_get_text(self.vocab, token) or b"").decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """Whether the token ends an answer (EOS, end of turn, end of message)."""
        if token not in self._eog:
            self._eog[token] = bool(lib.llama_vocab_is_eog(self.vocab, token))
        return self._eog[token]

    @cached_property
    def eog_tokens(self) -> tuple[int, ...]:
        return tuple(token for token in range(self.info.n_vocab) if lib.llama_vocab_is_eog(self.vocab, token))

    @property
    def adds_bos(self) -> bool:
        """Whether tokenize(add_special=True) starts with the BOS token."""
        return bool(lib.llama_vocab_get_add_bos(self.vocab))

    def chat_format(self, source: str = "") -> ChatFormat | BuiltinFormat:
        """The chat template of that source (`TemplateChoice`). Raises MoeedgeError if it cannot be parsed."""
        if source not in self._chat_formats:
            if source in builtin_names():
                self._chat_formats[source] = BuiltinFormat(source)
            else:
                text = source or (lib.llama_model_chat_template(self.handle, None) or b"").decode()
                ends = lib.llama_vocab_bos(self.vocab), lib.llama_vocab_eos(self.vocab)
                bos, eos = (
                    self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else "" for token in ends
                )
                self._chat_formats[source] = ChatFormat(text, bos=bos, eos=eos, is_given=bool(source))
        return self._chat_formats[source]

    def render_chat(self, messages: list[dict[str, str]], *, template: TemplateChoice = MODEL_TEMPLATE) -> str:
        """Returns the prompt of a conversation, without a BOS of the template where `tokenize` adds one."""
        chat_format = self.chat_format(template.source)
        arguments = template.variables(chat_format.variables)
        text = chat_format.render(messages, arguments=arguments)
        bos = chat_format.bos
        return text[len(bos) :] if bos and self.adds_bos and text.startswith(bos) else text

    def chat_tokens(self, messages: list[dict[str, str]], *, template: TemplateChoice = MODEL_TEMPLATE) -> list[int]:
        """Token ids of a conversation that asks for the next answer. What a user typed is text, never a control token.

        llama.cpp reads control tokens in a user's text, too, so a pasted `<|im_end|>` would end the message.
        """
        typed = [message["content"] for message in messages if message["role"] == "user"]
        tokens_typed = {token for text in typed for token in self.tokenize(text, add_special=False)}
        attributes = {token: lib.llama_vocab_get_attr(self.vocab, token) for token in tokens_typed}
        used = {token for token, bits in attributes.items() if bits & _CONTROL_ATTRIBUTES}
        if not used:
            return self.tokenize(self.render_chat(messages, template=template))
        # a character of Unicode's private use stands for each, since the template sees texts alone
        taken = {character for message in messages for character in message["content"]}
        free = (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in taken)
        marks = dict(zip(sorted(map(self.token_text, used), key=len, reverse=True), free, strict=False))
        marked = [dict(message) for message in messages]
        for message in marked:
            for text, mark in marks.items() if message["role"] == "user" else ():
                message["content"] = message["content"].replace(text, mark)
        texts = {mark: text for text, mark in marks.items()}
        first, *others = re.split(f"([{''.join(texts)}])", self.render_chat(marked, template=template))
        tokens = self.tokenize(first)
        for part in filter(None, others):
            tokens += self.tokenize(texts.get(part, part), add_special=False, parse_special=part not in texts)
        return tokens

    def check_template(self, template: TemplateChoice) -> list[str]:
        """Raises InputError for what that chat template cannot do. Returns sentences about variables without effect."""
        variables = self.chat_format(template.source).variables
        thinks = self.reasoning_tags(template) is not None or replace(template, think="low").can_think_so(variables)
        if not template.can_think_so(variables) and (thinks or template.think != "off"):
            raise InputError(
                f"The chat template has no variable that switches thinking to {template.think}.",
                "Leave out --think, or /set think auto.",
            )
        unused = [name for name in template.arguments if name not in variables]
        return [f"The chat template does not use {', '.join(unused)}: no effect."] if unused else []

    def reasoning_tags(self, template: TemplateChoice = MODEL_TEMPLATE) -> ReasoningTags | None:
        """The texts around reasoning in the model's answers; None where the template knows no reasoning."""
        if template.source not in self._reasoning:
            try:
                self._reasoning[template.source] = find_reasoning_tags(self.chat_format(template.source))
            except MoeedgeError:  # it cannot be parsed, and is not used
                self._reasoning[template.source] = None
        return self._reasoning[template.source]

    def load_adapters(self, adapters: Sequence[LoraAdapter]) -> list[Any]:
        """llama_adapter_lora * of each, none without weights. Raises ModelFileError for an unusable file."""
        return [] if self.header_only else [self._load_adapter(adapter.path) for adapter in adapters]

    def _load_adapter(self, path: Path) -> Any:
        if path in self._adapters:
            return self._adapters[path]
        if not path.is_file():
            raise ModelFileError(f"There is no adapter {path}.", "Give a LoRA adapter in GGUF format with --lora FILE.")
        library.clear_errors()
        with errors_for_aborts():
            handle = lib.llama_adapter_lora_init(self.handle, str(path).encode())
        if not handle:
            raise ModelFileError(
                f"llama.cpp cannot load the adapter {path}: {library.first_error()}.",
                "It must be in GGUF format and made for this model.",
            )
        if lib.llama_adapter_get_alora_n_invocation_tokens(handle):
            lib.llama_adapter_lora_free(handle)
            raise ModelFileError(
                f"{path.name} acts only after certain words (aLoRA), which moeedge does not look for.",
                "Name an adapter that always acts.",
            )
        self._adapters[path] = handle
        return handle

    def abandon(self) -> None:
        """Forgets the model without freeing it, since a context of it was abandoned."""
        self.handle = None

    def close(self) -> None:
        """Frees the model; its contexts must be closed before. Closing twice is harmless."""
        if self.handle:
            lib.llama_model_free(self.handle)
            self.handle = None
            self.vocab = None


def _n_host_layers(n_layers: int, n_gpu_layers: int) -> int | None:
    """llama.cpp's first layers, in host memory next to a GPU; None: all `n_layers` of the file, and the output."""
    if n_gpu_layers == 0:
        return None
    return 0 if n_gpu_layers < 0 else max(n_layers + 1 - n_gpu_layers, 0)


def _most(*numbers: int | None) -> int | None:
    """The largest number of layers; None: all layers."""
    return None if None in numbers else max(n for n in numbers if n is not None)


def _in_host_memory(
    path: Path, info: ModelInfo, n_first: int | None, settings: LoadSettings, device: str
) -> tuple[int, ...]:
    """Layers whose experts are in host memory: the first `n_first`, where no override puts an expert elsewhere."""
    first = tuple(layer for layer in info.expert_layers if n_first is None or layer < n_first)
    if not settings.overrides:
        return first
    is_host = library.ggml_functions().ggml_backend_buft_is_host
    places = [(re.compile(pattern), bool(is_host(buffer_type(name, device)))) for pattern, name in settings.overrides]
    experts, _ = gguf_file.expert_tensors(path, n_layers=info.n_layers)
    on_host: dict[int, list[bool]] = {}
    for tensor in experts:
        of_pattern = (host for pattern, host in places if pattern.search(tensor.name))
        on_host.setdefault(tensor.layer, []).append(next(of_pattern, tensor.layer in first))
    return tuple(sorted(layer for layer, each in on_host.items() if all(each)))


def _experts_of_first(n_layers: int | None, expert_layers: tuple[int, ...]) -> bytes:
    """A pattern for the names of expert tensors: those of the first `n_layers` layers, or of all for None."""
    if n_layers is None or n_layers > max(expert_layers, default=0):
        return _EXPERT_TENSORS.encode()
    layers = "|".join(map(str, range(n_layers)))
    return rf"^blk\.({layers})\.{_EXPERT_TENSORS}".encode() if n_layers else b"^$"


def _override_experts_used(path: Path, n_expert_used: int) -> Any:
    """A list of one metadata override and its end. Raises InputError for a number that the model does not allow."""
    key, of_layers = gguf_file.read_experts_used(path)
    n_of_file = max(of_layers, default=0)
    if n_of_file == 0:
        raise InputError(f"{path.name} has no experts.", "Give a Mixture-of-Experts model with -m.")
    if len(of_layers) > 1:  # llama.cpp would ignore the override
        raise InputError(f"{path.name} has a number of experts per token for each layer, which stays as it is.")
    if not 1 <= n_expert_used <= n_of_file:  # llama.cpp's graphs have no room for many more, and end the process
        raise InputError(
            f"{path.name} uses {n_of_file} experts per token: it cannot use {n_expert_used}.",
            f"Choose 1 to {n_of_file}.",
        )
    overrides = (lib.llama_model_kv_override * 2)()
    overrides[0].tag = lib.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[0].key = key.encode()
    overrides[0].value.val_i64 = n_expert_used
    return overrides


def buffer_type(name: str, device: str = "auto") -> int:
    """The ggml_backend_buffer_type_t of that name; of a dry-run GPU for any. Raises InputError, naming those here."""
    types = library.buffer_types()
    if name not in types and device == DRY_RUN_GPU:
        return int(library.ggml_functions().ggml_backend_dev_buffer_type(dry_run_gpu()))
    if name not in types:
        raise InputError(f"There is no memory of the type {name!r} here (-ot).", f"Choose from: {', '.join(types)}.")
    return types[name]
