"""Settings of llama.cpp's contexts and loader: each acts, and answers are those of stock with the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, ModelFileError
from moeedge.llama import library
from moeedge.llama.settings import KV_TYPES, ContextSettings, LoadSettings, LoraAdapter, RopeSettings, TensorOverride
from moeedge.native.abi import Phase
from moeedge.planning.memory_map import this_machine
from moeedge.planning.planner import Planner
from moeedge.run import is_warning
from tests.conftest import TinyFactory
from tests.support.counting import DEVICE, CountingDevice
from tests.support.greedy import judge
from tests.support.hybrid import hit_stats, hybrid_config
from tests.support.lora import make_adapter
from tests.support.sessions import answered, plain_config
from tests.support.stock import StockContext

PROMPT = np.random.default_rng(4).integers(0, 256, 80).tolist()
N_PREDICT = 40
OFF = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
YARN = RopeSettings(scaling="yarn", freq_scale=0.5, yarn_orig_ctx=2048)


def ggml(k: str, v: str) -> tuple[int, int]:
    return KV_TYPES[k].ggml_type, KV_TYPES[v].ggml_type


# name: settings of ours, those of the stock context
CASES: dict[str, tuple[ContextSettings, dict[str, Any]]] = {
    "f32": (ContextSettings(type_k="f32", type_v="f32"), {"types": ggml("f32", "f32")}),
    "bf16": (ContextSettings(type_k="bf16", type_v="bf16"), {"types": ggml("bf16", "bf16")}),
    "q8_0": (ContextSettings(type_k="q8_0", type_v="q8_0"), {"types": ggml("q8_0", "q8_0")}),
    "q4_0 and f16": (ContextSettings(type_k="q4_0"), {"types": ggml("q4_0", "f16")}),
    "q5_1 and iq4_nl": (ContextSettings(type_k="q5_1", type_v="iq4_nl"), {"types": ggml("q5_1", "iq4_nl")}),
    "q4_0 without flash attention": (
        ContextSettings(type_k="q4_0", flash_attn="off"),
        {"types": ggml("q4_0", "f16"), "flash_attn_type": OFF},
    ),
    "flash attention off": (ContextSettings(flash_attn="off"), {"flash_attn_type": OFF}),
    "yarn": (
        ContextSettings(rope=YARN),
        {"rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN, "rope_freq_scale": 0.5, "yarn_orig_ctx": 2048},
    ),
    "frequency base": (ContextSettings(rope=RopeSettings(freq_base=5000.0)), {"rope_freq_base": 5000.0}),
}


@pytest.fixture(scope="module")
def pair(tiny: TinyFactory) -> tuple[Path, Path]:
    return tiny("qwen3moe", head_dim=32), tiny("qwen3", head_dim=32)


def config(pair: tuple[Path, Path], **changes: Any) -> EngineConfig:
    return replace(plain_config(*pair, n_ctx=256), **changes)


def answer(session: Session) -> list[int]:
    return answered(session, PROMPT, N_PREDICT, ignore_eos=False).tokens


def state(session: Session) -> tuple[list[int], np.ndarray, int]:
    """An answer, the logits of a prompt, and the bytes of the KV caches."""
    found = answer(session)
    rows = session.target.decode(PROMPT[:20], phase=Phase.PREFILL, logits="all").copy()
    session.reset()
    return found, rows, sum(use.memory_bytes for use in session.memory_uses())


@pytest.fixture(scope="module")
def usual(pair: tuple[Path, Path]) -> tuple[list[int], np.ndarray, int]:
    with Session.open(config(pair)) as session:
        return state(session)


def check(path: Path, found: list[int], **of_stock: Any) -> None:
    """The answer is that of stock with these settings."""
    with StockContext(path, **of_stock) as stock:
        expected = stock.answer(PROMPT, N_PREDICT)
        assert len(found) == len(expected)
        assert found == expected or not judge(stock, PROMPT, found).faults


@pytest.mark.parametrize("device", ["none", "emulated:threads=1"])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_stocks_with_the_same_setting(
    case: str, device: str, pair: tuple[Path, Path], usual: tuple[list[int], np.ndarray, int]
) -> None:
    settings, of_stock = CASES[case]
    types = {"draft_type_k": settings.type_k, "draft_type_v": settings.type_v}
    with Session.open(config(pair, context=settings, device=device, **types)) as session:
        assert session.draft_context is not None
        assert session.draft_context.settings.type_k == settings.type_k
        found, rows, kv_bytes = state(session)
        assert [note for note in session.info.notes if "KV cache is kept" in note] or settings.type_k == "f16"
    check(pair[0], found, **of_stock)
    if settings.type_k == "f32":  # with flash attention llama.cpp computes with 16 bits of them
        assert kv_bytes == 2 * usual[2]
    elif device == "none":
        assert not np.array_equal(usual[1], rows), "it acts"


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(2048, 16), (8, 512), (2048, 1), (64, 3)])
def test_small_batches(n_batch: int, n_ubatch: int, pair: tuple[Path, Path]) -> None:
    for device in ("none", "emulated:threads=1"):
        with Session.open(config(pair, n_batch=n_batch, n_ubatch=n_ubatch, device=device)) as session:
            assert session.target.n_ubatch == min(n_batch, n_ubatch)
            found = answer(session)
        check(pair[0], found, n_batch=256, n_ubatch=min(n_batch, n_ubatch))


def test_types_that_do_not_suit_the_model(tiny_moe: Path) -> None:
    """Heads of 16 values, and blocks of 32."""
    with pytest.raises(EngineError) as caught:
        Session.open(EngineConfig(model=tiny_moe, n_ctx=256, context=ContextSettings(type_k="q8_0")))
    assert "-ctk" in caught.value.hint


@pytest.mark.parametrize("changes", [{"type_k": "q9"}, {"type_v": "q8_0", "flash_attn": "off"}, {"flash_attn": "yes"}])
def test_values_that_llama_cpp_does_not_have(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"-ct[kv]|-fa"):
        ContextSettings(**changes)


def test_threads_of_batches(pair: tuple[Path, Path]) -> None:
    with Session.open(config(pair, context=ContextSettings(n_threads_batch=2))) as session:
        assert llama_cpp.llama_n_threads(session.target.handle) == 1
        assert llama_cpp.llama_n_threads_batch(session.target.handle) == 2


@pytest.mark.parametrize(("n_ctx", "rope", "warns"), [(4096, None, False), (4352, None, True), (4352, YARN, False)])
def test_a_context_beyond_training(n_ctx: int, rope: RopeSettings | None, warns: bool, pair: tuple[Path, Path]) -> None:
    settings = ContextSettings() if rope is None else ContextSettings(rope=rope)
    asked = config(pair, n_ctx=n_ctx, context=settings)
    with Session.open(asked) as session:
        assert any(is_warning(note) and "4,096" in note for note in session.info.notes) == warns
    with Planner(asked, this_machine(asked)) as planner:
        planner.default_map()
        assert any("4,096" in note for note in planner.notes) == warns


# loading


@pytest.mark.parametrize("mode", ["none", "mmap", "dio"])
def test_load_modes(mode: Any, pair: tuple[Path, Path]) -> None:
    with Session.open(config(pair, load=LoadSettings(mode), draft=None, gamma=0)) as session:
        mapped = any(str(pair[0]) in line for line in Path("/proc/self/maps").read_text().splitlines())
        assert mapped == (mode == "mmap")
        check(pair[0], answer(session))


def locked_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmLck"))


@pytest.mark.parametrize("mode", ["mmap+mlock", "mlock"])
def test_a_locked_model_stays_in_memory_or_says_that_it_does_not(mode: Any, pair: tuple[Path, Path]) -> None:
    before = locked_kb()
    with Session.open(config(pair, load=LoadSettings(mode))) as session:
        said = [note for note in session.info.notes if "--mlock" in note]
        refused = any(is_warning(note) for note in said)
        assert refused or locked_kb() > before
        is_copied = any(use.buffer_type == "CPU_REPACK" for use in session.target.memory_uses())
        assert refused or bool(said) == is_copied
        check(pair[0], answer(session))


# adapters

ATTENTION = ("blk.0.attn_q.weight", "blk.2.attn_output.weight")
EXPERTS = ("blk.1.ffn_up_exps.weight", "blk.2.ffn_down_exps.weight", "blk.0.ffn_gate_exps.weight")


@pytest.mark.parametrize("device", ["none", "emulated:threads=1"])
@pytest.mark.parametrize("tensors", [ATTENTION, EXPERTS, (*ATTENTION, *EXPERTS)])
def test_an_adapter(tensors: tuple[str, ...], device: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "adapter.gguf", pair[0], tensors)
    settings = ContextSettings(adapters=(LoraAdapter(path, 0.5),))
    with Session.open(config(pair, context=settings, device=device)) as session:
        changes_experts = any("exps" in name for name in tensors)
        if device != "none":
            assert (session.placement is None) == changes_experts
            assert any("adapter changes experts" in note for note in session.info.notes) == changes_experts
        check(pair[0], answer(session), lora=path, lora_scale=0.5)
    with StockContext(pair[0], lora=path, lora_scale=0.5) as adapted, StockContext(pair[0]) as stock:
        assert stock.answer(PROMPT, N_PREDICT) != adapted.answer(PROMPT, N_PREDICT), "it acts"


def test_files_that_are_no_adapter(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_adapter(tmp_path / "other.gguf", pair[1], ["blk.0.attn_q.weight"], arch="qwen3")
    for path in (tmp_path / "none.gguf", pair[0], other):
        with pytest.raises(ModelFileError, match="adapter"):
            Session.open(config(pair, context=ContextSettings(adapters=(LoraAdapter(path),))))


# tensors elsewhere


def test_patterns_of_tensors() -> None:
    assert TensorOverride.parse(r"blk\.1\..*exps=CPU,attn=CUDA0") == (
        TensorOverride(r"blk\.1\..*exps", "CPU"),
        TensorOverride("attn", "CUDA0"),
    )
    for text in ("exps", "=CPU", "exps=", "(=CPU"):
        with pytest.raises(ValueError, match="-ot"):
            TensorOverride.parse(text)


def test_an_override_on_the_cpu(pair: tuple[Path, Path]) -> None:
    load = LoadSettings(overrides=(TensorOverride("exps", "CPU"), TensorOverride("nothing", "CPU")))
    with Session.open(config(pair, load=load, device="emulated:threads=1")) as session:
        assert session.placement is not None
        assert session.model.host_expert_layers == (0, 1, 2)
        assert [note for note in session.info.notes if "nothing=CPU matches no tensor" in note]
        check(pair[0], answer(session))


@pytest.mark.parametrize(
    ("pattern", "n_cpu_moe", "host"),
    [
        (r"blk\.1\..*exps", None, (0, 2)),
        (r"blk\.1\..*exps", 3, (0, 2)),
        (r"blk\.1\..*exps", 1, (0,)),
        ("exps", None, ()),
    ],
)
def test_an_override_next_to_the_expert_cache(
    pattern: str, n_cpu_moe: int | None, host: tuple[int, ...], tiny_moe: Path, counting: CountingDevice
) -> None:
    """Experts are on the GPU by hand; the cache serves the layers that are left in host memory, if there are any."""
    (place,) = [name for name in library.buffer_types() if name != "CPU"]
    load = LoadSettings(overrides=(TensorOverride(pattern, place),))
    asked = hybrid_config(tiny_moe, None, 0.5, gamma=0, device=DEVICE)
    with Session.open(replace(asked, load=load, n_gpu_layers=99, n_cpu_moe=n_cpu_moe)) as session:
        assert session.model.host_expert_layers == host
        assert (session.placement is not None) == bool(host)
        found = answer(session)
        if session.placement is not None:
            assert session.placement._cached_layers == list(host)
            hit_stats(session)
            counting.check()
        else:
            assert [note for note in session.info.notes if "-ot" in note]
    check(tiny_moe, found, n_ctx=512, gpu=DEVICE, n_gpu_layers=99, experts_on_cpu=True)


@pytest.mark.parametrize("case", ["adapter", "adapter of experts", "q8_0", "yarn"])
@pytest.mark.usefixtures("cache_folder")
def test_experts_that_are_loaded_from_the_file(case: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A model in RAM in part: experts come as they are needed, unless an adapter changes them."""
    if case in CASES:
        settings, of_stock = CASES[case]
    else:
        tensors = EXPERTS if case == "adapter of experts" else ATTENTION
        path = make_adapter(tmp_path / "adapter.gguf", pair[0], tensors)
        settings, of_stock = ContextSettings(adapters=(LoraAdapter(path),)), {"lora": path}
    asked = config(pair, context=settings, ram=120_000, load=LoadSettings("none"))
    with Session.open(asked) as session:
        is_loaded = case != "adapter of experts"
        assert (session.placement is not None and session.placement.loads_on_demand) == is_loaded
        assert any("--no-mmap" in note for note in session.info.notes) == is_loaded
        assert any("--ram has no effect" in note for note in session.info.notes) != is_loaded
        check(pair[0], answer(session), **of_stock)
