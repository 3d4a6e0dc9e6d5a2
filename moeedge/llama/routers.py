"""The routers of a model: read from its file, and what they select in a context, kept to a budget or replaced.

`Routers` predicts where a hidden state is routed without running the model. SP-MoE (section 3.2) feeds the inputs of
the draft's layers to the target's routers; Mixtral-Offloading, AdapMoE and Fate feed the input of this layer's router
to the next layer's. Such an input went through another norm than the router's, whose weights per channel change the
order of experts: `Routers.ratio` rescales them. The router's bias and that of the probabilities (DeepSeek-V3) are
applied, limits to groups of experts are not.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError, InputError, ModelFileError, require
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.llama.model_info import ModelInfo
from moeedge.llama.sequence import BatchPart
from moeedge.native import abi
from moeedge.native.abi import BudgetCoverage, BudgetRanking, Phase, RoutingBatchStruct, RoutingMode
from moeedge.native.library import load
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.trace.steps import RecordedRouting

FloatArray = NDArray[np.float32]

_TENSOR = re.compile(r"^blk\.(\d+)\.(.+)$")
_WEIGHT, _BIAS, _SELECTION = "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias"
_NORMS = ("ffn_norm.weight", "post_attention_norm.weight")  # before the router; the first one present is used
_ROLES = frozenset((_WEIGHT, _BIAS, _SELECTION, *_NORMS))
_BF16 = 30  # enum ggml_type
_TYPES = {0: "<f4", 1: "<f2", _BF16: "<u2"}
_SIGMOID = "2"  # enum llama_expert_gating_func_type
_IMPLICIT_SIGMOID = frozenset({"llama4"})  # architectures with sigmoid routers whose files do not say so
_MIN_NORM_WEIGHT = 1e-12  # a channel with a smaller weight carries no information


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Routers:
    """All routers of a model; a layer without a router has zeros."""

    weight: FloatArray  # [n_layers, n_experts, n_embd]
    bias: FloatArray | None  # [n_layers, n_experts], added to the logits
    selection_bias: FloatArray | None  # the same shape, added to the probabilities only to choose experts
    norm: FloatArray | None  # [n_layers, n_embd], weights of the norm before the router
    sigmoid: bool = False  # probabilities by sigmoid instead of softmax

    @classmethod
    def read(cls, model: Model) -> Routers:
        """Reads the routers of `model`. Raises ModelFileError if it has none or they are quantized."""
        info = model.info
        tensors = _read_layer_tensors(model.path, _ROLES)
        weight = _stacked(tensors, _WEIGHT, (info.n_layers, info.n_experts, info.n_embd))
        if weight is None:
            raise ModelFileError(f"{model.path} has no routers.")
        per_expert = (info.n_layers, info.n_experts)
        selection_bias = _stacked(tensors, _SELECTION, per_expert)
        # without a key in the file, a bias for the choice means a router of DeepSeek-V3's kind
        default = selection_bias is not None or info.architecture in _IMPLICIT_SIGMOID
        gating = model.metadata(f"{info.architecture}.expert_gating_func")
        return cls(
            weight=weight,
            bias=_stacked(tensors, _BIAS, per_expert),
            selection_bias=selection_bias,
            norm=_norm_weights(tensors, info.n_layers, info.n_embd),
            sigmoid=default if gating is None else gating == _SIGMOID,
        )

    def ratio(self, layers: NDArray[np.intp], read_norm: FloatArray | None) -> FloatArray | None:
        """Factors [n, n_embd] from a norm `read_norm` [n, n_embd] to that of `layers`; None if either is unknown."""
        if self.norm is None or read_norm is None:
            return None
        has_values = np.abs(read_norm) > _MIN_NORM_WEIGHT
        return np.where(has_values, self.norm[layers] / np.where(has_values, read_norm, 1.0), 0.0).astype(np.float32)

    def probabilities(self, logits: FloatArray) -> FloatArray:
        """Returns the probabilities of experts from logits, both [..., n_experts]."""
        if self.sigmoid:
            return np.asarray(1.0 / (1.0 + np.exp(-logits)), dtype=np.float32)
        raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(raised / raised.sum(axis=-1, keepdims=True), dtype=np.float32)

    def scores(self, layers: slice, inputs: FloatArray) -> FloatArray:
        """Returns the probabilities [n, n_tokens, n_experts] of `layers` for router inputs [n, n_tokens, n_embd]."""
        logits = np.matmul(inputs, self.weight[layers].transpose(0, 2, 1))
        if self.bias is not None:
            logits += self.bias[layers][:, None, :]
        return self.probabilities(logits)

    def best(self, layers: slice, scores: FloatArray, k: int) -> NDArray[np.int32]:
        """Returns the k experts [n, n_tokens, k] that `scores` choose, the most likely first."""
        chosen_by = scores
        if self.selection_bias is not None:
            chosen_by = scores + self.selection_bias[layers][:, None, :]
        top = np.argpartition(-chosen_by, k - 1, axis=-1)[..., :k]
        order = np.argsort(-np.take_along_axis(chosen_by, top, axis=-1), axis=-1, kind="stable")
        return np.take_along_axis(top, order, axis=-1).astype(np.int32)


def read_norms(model: Model) -> FloatArray | None:
    """Returns the norms before the routers or FFNs, float32 [n_layers, n_embd]; None if a layer has none."""
    return _norm_weights(_read_layer_tensors(model.path, frozenset(_NORMS)), model.info.n_layers, model.info.n_embd)


def _norm_weights(tensors: dict[tuple[int, str], FloatArray], n_layers: int, n_embd: int) -> FloatArray | None:
    for role in _NORMS:
        if all((layer, role) in tensors for layer in range(n_layers)):
            return _stacked(tensors, role, (n_layers, n_embd))
    return None


def _read_layer_tensors(path: Path, roles: frozenset[str]) -> dict[tuple[int, str], FloatArray]:
    """Returns the tensors of `roles` ("ffn_norm.weight") as float32 by layer and role, the innermost dimension last."""
    tensors = {}
    for tensor in gguf_file.read_all_tensors(path):
        match = _TENSOR.match(tensor.name)
        if match is not None and match[2] in roles:
            tensors[int(match[1]), match[2]] = _read(tensor)
    return tensors


def _read(tensor: gguf_file.GgufTensor) -> FloatArray:
    if tensor.type not in _TYPES:
        raise ModelFileError(
            f"{tensor.name} of {tensor.file} is quantized; only F32, F16 and BF16 can be read.",
            "Use a file whose routers are F32.",
        )
    raw = np.fromfile(tensor.file, _TYPES[tensor.type], count=math.prod(tensor.shape), offset=tensor.offset)
    if tensor.type == _BF16:
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(raw, dtype=np.float32).reshape(tensor.shape[::-1])


def _stacked(tensors: dict[tuple[int, str], FloatArray], role: str, shape: tuple[int, ...]) -> FloatArray | None:
    """Stacks the tensors of one role to `shape` [n_layers, ...], zeros for a layer without it; None if all lack it."""
    layers = [layer for layer, name in tensors if name == role and layer < shape[0]]
    if not layers:
        return None
    stacked = np.zeros(shape, dtype=np.float32)
    for layer in layers:
        stacked[layer] = tensors[layer, role].reshape(shape[1:])
    return stacked


_TWO_BLOCKS = "grovemoe"  # whose layers have a second block, with an expert for each group of the first's experts


class _EvalHook:
    """Native code that llama.cpp's eval callback calls for each node of the graphs of one context.

    Made before its llama.cpp context, whose parameters it changes, and closed after it.
    """

    NAME: ClassVar[str]  # in the names of the library's functions
    LABEL: ClassVar[str]  # in errors

    def __init__(self, info: ModelInfo, parameters: Any, *sizes: int) -> None:
        self._info, self._library = info, load()
        self._n_used = np.asarray(info.used_per_layer, dtype=np.int32)
        create, n_used = self._function("create"), self._n_used
        self._handle = create(n_used.size, info.n_experts, n_used.ctypes.data, *sizes)
        if not self._handle:
            raise BackendError(f"moeedge's {self.LABEL} cannot be made: out of memory.")
        parameters.cb_eval = ctypes.cast(self._function("on_node"), lib.ggml_backend_sched_eval_callback)
        parameters.cb_eval_user_data = self._handle

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"moeedge_{self.NAME}_{name}")

    def call(self, name: str, *arguments: Any) -> int:
        """The result of a function of the library with this object. Raises BackendError for a negative one."""
        result = int(self._function(name)(self._handle, *arguments))
        if result < 0:
            raise BackendError(f"moeedge's {self.LABEL} failed: {self._library.moeedge_last_error().decode()}")
        return result

    def close(self) -> None:
        """Closing twice is harmless."""
        if self._handle:
            self._function("destroy")(self._handle)
            self._handle = None


class ContextBudget(_EvalHook):
    """The expert budget of one context, to which the experts of a verification are kept.

    `moeedge.lab.policies.expert_budget` defines the same in NumPy.
    """

    NAME, LABEL = "budget", "expert budget"

    def __init__(self, info: ModelInfo, parameters: Any) -> None:
        super().__init__(info, parameters)
        self.budget: ExpertBudget | None = None  # of verifications; None: they use all experts that the router selects
        self._layers = np.zeros(self._n_used.size, dtype=abi.BUDGET_LAYER)

    def set(self, budget: ExpertBudget | None) -> None:
        """Raises InputError if the budget does not suit the model."""
        if budget is not None:
            info = self._info
            if info.architecture == _TWO_BLOCKS:
                problem = "Expert budgets do not support GroveMoE, whose layers select two kinds of experts."
                raise InputError(problem, "Leave the expert budget out.")
            layers = np.asarray(info.expert_layers, dtype=np.intp)
            budgets = budget.per_layer(layers, info.n_layers, info.n_experts, info.used_per_layer)
            budgets[budgets == 0] = info.n_experts  # layers without experts
            self.configure(budgets, BudgetRanking[budget.ranking.upper()], BudgetCoverage[budget.coverage.upper()])
        self.budget = budget

    def configure(self, budgets: NDArray[np.int32], ranking: BudgetRanking, coverage: BudgetCoverage) -> None:
        """Sets budgets [n_layers]. Raises BackendError for values that the library does not know."""
        budgets = np.ascontiguousarray(budgets, dtype=np.int32)
        require(budgets.shape == self._n_used.shape, f"there must be a budget for each of {self._n_used.size} layers")
        raw = abi.BudgetConfigStruct(int(ranking), int(coverage), budgets.ctypes.data)
        self.call("configure", ctypes.byref(raw))

    @contextmanager
    def during(self, phase: Phase, n_tokens: int) -> Iterator[None]:
        """Around a decode: a verification of more than one token keeps to the budget, everything else is exact."""
        if self.budget is None or phase != Phase.VERIFY or n_tokens < 2:
            yield
            return
        try:  # Ctrl-C may come at any time
            self.call("set_active", 1)
            yield
        finally:
            self.call("set_active", 0)

    def read(self) -> NDArray[Any]:
        """The layers' figures since the last call, abi.BUDGET_LAYER [n_layers]; the next call reuses the array."""
        self.call("read", self._layers.ctypes.data)
        return self._layers


class ContextRouting(_EvalHook):
    """Forced routing of one context, which replaces the experts that the routers select.

    It works alike in stock llama.cpp's graph and in ours, so that both compute the same experts at the same positions;
    the weights are those of the model's own gate for these experts.

    mode: what happens to the next batches. offset: row of the recorded routing that the first position of a text gets.
    text: the tokens of the text by position, int32, where they are known: rejected drafts get an unrelated text's.
    """

    NAME, LABEL = "routing", "forced routing"

    def __init__(self, info: ModelInfo, recorded: RecordedRouting, parameters: Any) -> None:
        super().__init__(info, parameters, parameters.n_ubatch)
        self.recorded, self.mode, self.offset = recorded, RoutingMode.FORCED, 0
        self.text: NDArray[np.int32] | None = None
        self._ids = recorded.ids[:0]  # of the batch in hand

    def prepare(self, parts: Sequence[BatchPart]) -> None:
        """Sets the experts of the batch with these parts, at the ends of their sequences."""
        if self.mode == RoutingMode.FORCED:
            positions = np.concatenate([part.sequence.n_past + np.arange(len(part.tokens)) for part in parts])
            unrelated = np.zeros(len(positions), dtype=np.bool_)
            if self.text is not None:
                unrelated = np.concatenate([self._is_unrelated(part) for part in parts])
            self._ids = self.recorded.rows(positions + self.offset, unrelated)
        n_tokens = sum(len(part.tokens) for part in parts)
        raw = RoutingBatchStruct(int(self.mode), n_tokens, self._ids.ctypes.data)
        self.call("set", ctypes.byref(raw))

    def _is_unrelated(self, part: BatchPart) -> NDArray[np.bool_]:
        """Whether each token is no part of the text: a draft that differs from it, and all after that."""
        assert self.text is not None
        n_past = part.sequence.n_past
        expected = np.resize(self.text[n_past:], len(part.tokens)) if n_past < len(self.text) else -1
        return np.asarray(np.logical_or.accumulate(np.asarray(part.tokens, dtype=np.int32) != expected))
