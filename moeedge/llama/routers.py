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
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError, InputError, ModelFileError, require
from moeedge.llama import gguf_file
from moeedge.llama.model import Model, ModelInfo
from moeedge.llama.sequence import BatchPart
from moeedge.native import abi
from moeedge.native.abi import BudgetCoverage, BudgetRanking, Phase, RoutingBatchStruct, RoutingMode, view
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


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one layer in the newest verification; views of native memory that the next one overwrites."""

    kind: abi.RouterKind
    values: NDArray[np.float32]  # [T, n_experts], the router's output
    selection: NDArray[np.float32]  # [T, n_experts], sorted by the router's top-k
    natural_ids: NDArray[np.int32]  # [T, k], the selected experts without the budget
    ids: NDArray[np.int32]  # [T, k], with it


class ContextBudget:
    """The expert budget of one context: llama.cpp's eval callback keeps the experts of a verification to it.

    Made before its llama.cpp context, whose parameters it changes, and closed after it.
    `moeedge.lab.policies.expert_budget` defines the same in NumPy.
    """

    def __init__(self, info: ModelInfo, parameters: Any) -> None:
        n_layers = len(info.used_per_layer)
        self.budget: ExpertBudget | None = None  # of verifications; None: they use all experts that the router selects
        self._info = info
        self._n_used = np.asarray(info.used_per_layer, dtype=np.int32)
        self._library = load()
        self._handle = self._library.moeedge_budget_create(n_layers, info.n_experts, self._n_used.ctypes.data)
        if not self._handle:
            raise BackendError("moeedge's expert budget cannot be made: out of memory.")
        self._layers = np.zeros(n_layers, dtype=abi.BUDGET_LAYER)
        parameters.cb_eval = ctypes.cast(self._library.moeedge_budget_on_node, lib.ggml_backend_sched_eval_callback)
        parameters.cb_eval_user_data = self._handle

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
        _check_budget(self._library.moeedge_budget_configure(self._handle, ctypes.byref(raw)))

    @contextmanager
    def during(self, phase: Phase, n_tokens: int) -> Iterator[None]:
        """Around a decode: a verification of more than one token keeps to the budget, everything else is exact."""
        if self.budget is None or phase != Phase.VERIFY or n_tokens < 2:
            yield
            return
        try:  # Ctrl-C may come at any time
            self.set_active(True)
            yield
        finally:
            self.set_active(False)

    def set_active(self, on: bool) -> None:
        """Whether the next decodes keep to the budget."""
        _check_budget(self._library.moeedge_budget_set_active(self._handle, int(on)))

    def read(self) -> NDArray[Any]:
        """The layers' figures since the last call, abi.BUDGET_LAYER [n_layers]; the next call reuses the array."""
        _check_budget(self._library.moeedge_budget_read(self._handle, self._layers.ctypes.data))
        return self._layers

    def set_capture(self, on: bool) -> None:
        """Whether `routing` has the router's values of verifications from now on."""
        _check_budget(self._library.moeedge_budget_set_capture(self._handle, int(on)))

    def routing(self, layer: int) -> LayerRouting | None:
        """The layer's routing in the newest verification; None without one. Requires `set_capture`."""
        raw = abi.BudgetRoutingStruct()
        _check_budget(self._library.moeedge_budget_get_routing(self._handle, layer, ctypes.byref(raw)))
        if raw.n_tokens == 0:
            return None
        wide, narrow = (raw.n_tokens, self._info.n_experts), (raw.n_tokens, int(self._n_used[layer]))
        return LayerRouting(
            abi.RouterKind(raw.kind),
            view(raw.values, wide, np.float32),
            view(raw.selection, wide, np.float32),
            view(raw.natural_ids, narrow, np.int32),
            view(raw.ids, narrow, np.int32),
        )

    def close(self) -> None:
        """Frees the budget; closing twice is harmless."""
        if self._handle:
            self._library.moeedge_budget_destroy(self._handle)
            self._handle = None


def _check_budget(status: int) -> None:
    if status < 0:
        raise BackendError(f"moeedge's expert budget failed: {load().moeedge_last_error().decode()}")


class ContextRouting:
    """Forced routing of one context: llama.cpp's eval callback replaces the experts that the routers select.

    It works alike in stock llama.cpp's graph and in ours, so that both compute the same experts at the same positions;
    the weights are those of the model's own gate for these experts. Made before its llama.cpp context, whose parameters
    it changes, and closed after it.

    mode: what happens to the next batches. offset: row of the recorded routing that the first position of a text gets.
    text: the tokens of the text by position, int32, where they are known: rejected drafts get an unrelated text's.
    """

    def __init__(self, info: ModelInfo, recorded: RecordedRouting, parameters: Any) -> None:
        self._info, self.recorded = info, recorded
        self.mode, self.offset = RoutingMode.FORCED, 0
        self.text: NDArray[np.int32] | None = None
        self._library = load()
        n_used = np.asarray(info.used_per_layer, dtype=np.int32)
        self._handle = self._library.moeedge_routing_create(
            len(n_used), info.n_experts, n_used.ctypes.data, parameters.n_ubatch
        )
        if not self._handle:
            raise BackendError("moeedge's forced routing cannot be made: out of memory.")
        self._ids, self._n_tokens = recorded.ids[:0], 0  # of the batch in hand
        parameters.cb_eval = ctypes.cast(self._library.moeedge_routing_on_node, lib.ggml_backend_sched_eval_callback)
        parameters.cb_eval_user_data = self._handle

    def prepare(self, parts: Sequence[BatchPart]) -> None:
        """Sets the experts of the batch with these parts, at the ends of their sequences."""
        if self.mode == RoutingMode.FORCED:
            positions = np.concatenate([part.sequence.n_past + np.arange(len(part.tokens)) for part in parts])
            unrelated = np.zeros(len(positions), dtype=np.bool_)
            if self.text is not None:
                unrelated = np.concatenate([self._is_unrelated(part) for part in parts])
            self._ids = self.recorded.rows(positions + self.offset, unrelated)
        self._n_tokens = sum(len(part.tokens) for part in parts)
        raw = RoutingBatchStruct(int(self.mode), self._n_tokens, self._ids.ctypes.data)
        self._check(self._library.moeedge_routing_set(self._handle, ctypes.byref(raw)))

    def _is_unrelated(self, part: BatchPart) -> NDArray[np.bool_]:
        """Whether each token is no part of the text: a draft that differs from it, and all after that."""
        assert self.text is not None
        n_past = part.sequence.n_past
        expected = np.resize(self.text[n_past:], len(part.tokens)) if n_past < len(self.text) else -1
        return np.asarray(np.logical_or.accumulate(np.asarray(part.tokens, dtype=np.int32) != expected))

    def set_capture(self, on: bool) -> None:
        """Whether `used` has the experts of later batches."""
        self._check(self._library.moeedge_routing_set_capture(self._handle, int(on)))

    def used(self, layer: int) -> NDArray[np.int32]:
        """The experts [T, k] that llama.cpp's graph used in the newest batch; for tests. Requires `set_capture`."""
        k = self._info.used_per_layer[layer]
        out = np.empty(self._n_tokens * k or 1, dtype=np.int32)
        n = self._library.moeedge_routing_captured(self._handle, layer, out.ctypes.data, out.size)
        return out[: max(n, 0)].reshape(-1, max(k, 1))

    def close(self) -> None:
        """Frees the hook; closing twice is harmless."""
        if self._handle:
            self._library.moeedge_routing_destroy(self._handle)
            self._handle = None

    def _check(self, status: int) -> None:
        if status < 0:
            raise BackendError(f"moeedge's forced routing failed: {self._library.moeedge_last_error().decode()}")
