"""Vocabulary, the shape that a model states, and what its head says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import pytest

from moeedge.errors import InputError, VocabularyMismatchError
from moeedge.hardware.devices import Storage
from moeedge.lab.widen.random_model import ENDOFTEXT, IM_END, IM_START, N_VOCAB
from moeedge.llama.context import Context
from moeedge.llama.draft_heads import check_compatible
from moeedge.llama.model import Model
from moeedge.llama.model_memory import ModelMemory, choose_n_ctx
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> Iterator[Model]:
    with Model.load(tiny_moe) as loaded:
        yield loaded


def used_by_three_tokens(model: Model) -> list[int]:
    """Experts of each layer."""
    with Context(model, n_ctx=64, n_threads=1) as context:
        context.decode([65, 66, 67], phase=Phase.VERIFY, logits="all")
        return context.sensor.read_counts().sum(axis=1).tolist()


def test_info(model: Model, tiny_moe: Path, tiny: TinyFactory) -> None:
    info = model.info
    assert (info.architecture, info.n_layers, info.n_expert_layers) == ("qwen3moe", 3, 3)
    assert (info.n_experts, info.n_expert_used, info.n_vocab) == (16, 4, N_VOCAB)
    assert (info.n_ctx_train, info.n_embd, info.n_swa) == (4096, 64, 0)
    assert info.size_bytes == tiny_moe.stat().st_size
    assert model.can_roll_back
    with Model.load(tiny("qwen3moe", layers=48), header_only=True) as large:  # which llama.cpp calls 30B.A3B
        assert large.info.description == "qwen3moe all F32"


def test_fewer_experts_per_token(tiny_moe: Path) -> None:
    """llama.cpp's override of expert_used_count: the router chooses so many."""
    with Model.load(tiny_moe, n_expert_used=2) as fewer:
        assert fewer.info.n_expert_used == 2
        assert used_by_three_tokens(fewer) == [6, 6, 6]
    for n_expert_used in (0, 5):
        with pytest.raises(InputError, match="4 experts"):
            Model.load(tiny_moe, n_expert_used=n_expert_used)


def test_experts_per_token_of_each_layer(tiny: TinyFactory) -> None:
    """As in Nemotron's Puzzle models, and a list of equal numbers."""
    for arch, used, in_each in (("nemotron_h_moe", (0, 4, 0, 3), (0, 4, 0, 3)), ("qwen3moe", (4, 4, 4), ())):
        path = tiny(arch, per_layer=True)
        with Model.load(path) as model:
            assert model.info.n_expert_used == 4
            assert (model.info.used_per_layer, model.info.n_expert_used_by_layer) == (used, in_each)
            assert used_by_three_tokens(model) == [3 * n for n in used]
        with pytest.raises(InputError):  # llama.cpp ignores an override of a list
            Model.load(path, n_expert_used=2)


@pytest.mark.parametrize("text", ["", "Hello there", "naïve 🦙 日本", "a\nb\tc", "x" * 5000])
def test_tokens_spell_the_text(model: Model, text: str) -> None:
    assert b"".join(map(model.piece, model.tokenize(text))).decode() == text


def test_half_of_a_surrogate_pair_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="surrogate"):
        model.tokenize("a \ud800")


def test_special_tokens(model: Model) -> None:
    assert model.tokenize("<|im_start|>") == [IM_START]
    assert len(model.tokenize("<|im_start|>", parse_special=False)) > 1
    assert model.piece(IM_END) == b"" and model.piece(IM_END, special=True) == b"<|im_end|>"
    assert [model.is_eog(token) for token in (IM_END, ENDOFTEXT, 65)] == [True, True, False]


def test_dense_models_have_no_experts_and_a_vocabulary_to_compare(
    model: Model, tiny_draft: Path, tmp_path: Path
) -> None:
    with Model.load(tiny_draft) as draft:
        assert (draft.info.n_experts, draft.info.expert_layers) == (0, ())
        assert check_compatible(model, draft) == N_VOCAB
    draft.close()  # twice is harmless
    with pytest.raises(InputError, match="no experts"):
        Model.load(tiny_draft, n_expert_used=1)
    other = tmp_path / "other.gguf"
    data = tiny_draft.read_bytes()
    assert data.count(b"<|im_start|>") >= 1
    other.write_bytes(data.replace(b"<|im_start|>", b"<|imstart_|>"))
    with Model.load(other) as draft:
        expected = rf"token {IM_START} is '<\|imstart_\|>' in the draft and '<\|im_start\|>' in the model"
        with pytest.raises(VocabularyMismatchError, match=expected) as caught:
            check_compatible(model, draft)
        assert caught.value.exit_code == 2


def test_context_size_follows_free_memory(model: Model) -> None:
    memory = ModelMemory.of(model)
    per_token = memory.kv_bytes(1)
    assert per_token == 3 * 2 * (16 + 16) * 2  # layers x kv heads x (key + value) x float16
    assert choose_n_ctx([memory], free_bytes=2**40) == (4096, None)
    size, note = choose_n_ctx([memory, memory], free_bytes=per_token * 4 * 1000)
    assert size == 768 and "instead of the 4,096" in note
    assert choose_n_ctx([memory], free_bytes=0)[0] == 256
    assert choose_n_ctx([memory, memory], 1000, free_bytes=2 * 1000 * per_token) == (1000, None)
    with pytest.raises(InputError, match=r"1,001 tokens needs .* Use -c 768 or less"):
        choose_n_ctx([memory, memory], 1001, free_bytes=2 * 1000 * per_token)


@pytest.mark.parametrize(("storage", "repacked"), [("loaded", True), ("mapped", False)])
def test_experts_with_a_gpu_are_repacked_where_they_are_loaded(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage, repacked: bool
) -> None:
    asked: list[bool] = []
    load = lib.llama_model_load_from_file

    def remember(path: bytes, parameters: Any) -> Any:
        asked.append(parameters.no_host)
        return load(path, parameters)

    monkeypatch.setattr(lib, "llama_model_load_from_file", remember)
    Model.load(tiny_moe, experts_on_cpu=True, storage=storage).close()
    assert asked == [repacked]
