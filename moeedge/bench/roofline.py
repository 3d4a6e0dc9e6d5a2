"""The roofline of a CPU (Williams et al. 2009): memory delivers weights so fast, the processor multiplies so fast.

The memory's read speed limits models that are larger than the processor's caches. KV cache and attention are not
counted, nor conversions: products are those of bytes, the fastest that kernels have.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from moeedge.hardware.host import available_memory
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.native.cache import ExpertTensor
from moeedge.native.compute import multiply_speed, read_speed
from moeedge.paths import text_of

_BYTES_MIN = 128 << 20  # of the memory that is read
_CACHES = 4  # it is so many times as large as the last caches of the threads' processors
_FREE_SHARE = 0.25  # of the free memory that it may take
_PROCESSORS = Path("/sys/devices/system/cpu")  # Linux only


@dataclass(frozen=True)
class Weights:
    """What tokens need of a model: bytes that are read, and weights that are multiplied."""

    dense_bytes: int  # every step; the input embedding only if it is the output matrix, too
    expert_layers: tuple[tuple[int, int, int], ...]  # of each: bytes of an expert, experts, experts per token
    products_per_token: int  # but those of the output matrix
    output_products: int  # of the last token of a prompt
    expert_products: int  # of one expert in every MoE layer, together

    @property
    def expert_bytes(self) -> int:
        """Of one expert in every MoE layer, together."""
        return sum(size for size, _, _ in self.expert_layers)

    @property
    def bytes_per_weight(self) -> float:
        """Of experts, or of all weights of a dense model."""
        if self.expert_products:
            return self.expert_bytes / self.expert_products
        return self.dense_bytes / max(self.products(1), 1)

    def bytes_of(self, n_tokens: int) -> float:
        """Of a batch whose tokens choose experts independently [estimate]: tokens of one text share more."""
        experts = (size * n * (1 - (1 - used / n) ** n_tokens) for size, n, used in self.expert_layers)
        return self.dense_bytes + sum(experts)

    def products(self, n_tokens: int) -> int:
        """Of a prompt of so many tokens."""
        return n_tokens * self.products_per_token + self.output_products

    @classmethod
    def read(cls, model: Model) -> Weights:
        path, n_layers, used_per_layer = model.path, model.info.n_layers, model.info.used_per_layer
        tensors = [t for part in gguf_file.parts(path) for t in gguf_file.read_tensors(part)]
        # the blocks after the last layer are heads, which draft
        layers_of = {t.name: int(found[1]) for t in tensors if (found := gguf_file.LAYER.match(t.name))}
        tensors = [t for t in tensors if layers_of.get(t.name, 0) < n_layers]
        experts, _ = gguf_file.expert_tensors(path, n_layers=n_layers)
        by_layer = defaultdict[int, list[ExpertTensor]](list)
        for tensor in experts:
            by_layer[tensor.layer].append(tensor)
        layers = [(sum(t.stride for t in own), own[0].n_experts, used_per_layer[n]) for n, own in by_layer.items()]
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        output = shapes.get("output.weight", shapes.get("token_embd.weight", (0, 0)))
        others = {tensor.name for tensor in experts} | {"output.weight", "token_embd.weight"}
        products = sum(prod(shape) for name, shape in shapes.items() if shape[1] > 1 and name not in others)
        products += sum(t.ne0 * t.ne1 * used_per_layer[t.layer] for t in experts if t.ne1 > 1)
        n_bytes = gguf_file.bytes_per_token(tensors, experts, used_per_layer)
        n_expert_bytes = sum(size * used for size, _, used in layers)
        expert_products = sum(t.ne0 * t.ne1 for t in experts)
        return cls(n_bytes - n_expert_bytes, tuple(layers), products, prod(output[:2]), expert_products)


@dataclass(frozen=True)
class Roofline:
    """The limits of decoding without drafts and of prompts."""

    read_bytes_per_s: float  # by as many threads as decode
    products_per_s: float  # of bytes; 0.0: unknown
    weights: Weights

    @property
    def bytes_per_token(self) -> int:
        return round(self.weights.bytes_of(1))

    @property
    def limit_ts(self) -> float:
        """Tokens/s at most, one token at a time."""
        return self.read_bytes_per_s / self.bytes_per_token

    def prompt_limit_ts(self, n_tokens: int) -> float:
        """Tokens/s at most of a prompt that is one batch."""
        multiply_s = self.weights.products(n_tokens) / self.products_per_s if self.products_per_s else 0.0
        return n_tokens / max(multiply_s, self.weights.bytes_of(n_tokens) / self.read_bytes_per_s)


def measure_read_speed(n_threads: int) -> float:
    """Bytes per second that so many threads read from memory at once; 0.0 where memory is short."""
    n_bytes = max(_BYTES_MIN, _CACHES * _last_cache_bytes(n_threads))
    return 0.0 if n_bytes > _FREE_SHARE * available_memory() else read_speed(n_bytes, n_threads)


def measure_roofline(model: Model, n_threads: int) -> Roofline | None:
    """Measures the speeds; None where weights are on a GPU, or where memory is short."""
    speed = 0.0 if model.uses_gpu else measure_read_speed(n_threads)
    if speed == 0:
        return None
    weights = Weights.read(model)
    return Roofline(speed, multiply_speed(n_threads), weights) if weights.bytes_of(1) > 0 else None


def _last_cache_bytes(n_threads: int) -> int:
    """Size of the last caches that so many threads can have, 0 where it is unknown: groups of cores have their own."""
    sizes: dict[str, int] = {}  # by the processors that share the cache
    for caches in _PROCESSORS.glob("cpu[0-9]*/cache"):
        with suppress(ValueError):  # a processor that is off, a virtual machine
            last = max(caches.glob("index[0-9]*"), key=lambda folder: int(text_of(folder / "level")))
            sizes[text_of(last / "shared_cpu_list")] = int(text_of(last / "size").removesuffix("K")) * 1024
    return sum(sorted(sizes.values())[-n_threads:])
