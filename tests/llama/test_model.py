"""Vocabulary, chat templates and the shape that a model states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import pytest

from moeedge.errors import EngineError, InputError, VocabularyMismatchError
from moeedge.hardware.devices import Storage
from moeedge.lab.widen.vocabulary import ENDOFTEXT, IM_END, IM_START, N_VOCAB
from moeedge.llama.context import Context
from moeedge.llama.draft_heads import check_compatible
from moeedge.llama.model import Model
from moeedge.llama.model_memory import ModelMemory, choose_n_ctx
from moeedge.llama.text import ChatFormat
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory

TURN = [{"role": "user", "content": "Hi"}]


def test_info(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model:
        info = model.info
        assert (info.architecture, info.n_layers, info.n_expert_layers) == ("qwen3moe", 3, 3)
        assert (info.n_experts, info.n_expert_used, info.n_vocab) == (16, 4, N_VOCAB)
        assert (info.n_ctx_train, info.n_embd, info.n_swa) == (4096, 64, 0)
        assert info.size_bytes == tiny_moe.stat().st_size
        assert model.can_roll_back


def test_the_description_has_no_guessed_size(tiny: TinyFactory) -> None:
    with Model.load(tiny("qwen3moe", layers=48), header_only=True) as model:  # which llama.cpp calls 30B.A3B
        assert model.info.description == "qwen3moe all F32"


def test_fewer_experts_per_token(tiny_moe: Path) -> None:
    """llama.cpp's override of expert_used_count: the router chooses so many."""
    with Model.load(tiny_moe, n_expert_used=2) as model, Context(model, n_ctx=64, n_threads=1) as context:
        assert model.info.n_expert_used == 2
        context.decode([65, 66, 67], phase=Phase.VERIFY, logits="all")
        assert context.sensor is not None
        assert context.sensor.read_counts().sum(axis=1).tolist() == [6, 6, 6]


@pytest.mark.parametrize("n_expert_used", [0, 5])
def test_experts_per_token_are_checked(tiny_moe: Path, n_expert_used: int) -> None:
    with pytest.raises(InputError, match="4 experts"):
        Model.load(tiny_moe, n_expert_used=n_expert_used)


def test_experts_per_token_of_each_layer(tiny: TinyFactory) -> None:
    """As in Nemotron's Puzzle models, and a list of equal numbers."""
    for arch, used, in_each in (("nemotron_h_moe", (0, 4, 0, 3), (0, 4, 0, 3)), ("qwen3moe", (4, 4, 4), ())):
        path = tiny(arch, per_layer=True)
        with Model.load(path) as model, Context(model, n_ctx=64, n_threads=1) as context:
            assert model.info.n_expert_used == 4
            assert (model.info.used_per_layer, model.info.n_expert_used_by_layer) == (used, in_each)
            context.decode([65, 66, 67], phase=Phase.VERIFY, logits="all")
            assert context.sensor is not None
            assert context.sensor.read_counts().sum(axis=1).tolist() == [3 * n for n in used]
        with pytest.raises(InputError):  # llama.cpp ignores an override of a list
            Model.load(path, n_expert_used=2)


def test_dense_models_have_no_experts(tiny_draft: Path) -> None:
    with Model.load(tiny_draft) as model:
        assert (model.info.n_experts, model.info.expert_layers) == (0, ())
    with pytest.raises(InputError, match="no experts"):
        Model.load(tiny_draft, n_expert_used=1)


@pytest.mark.parametrize("text", ["", "Hello there", "naïve 🦙 日本", "a\nb\tc", "x" * 5000])
def test_tokens_spell_the_text(tiny_moe: Path, text: str) -> None:
    with Model.load(tiny_moe) as model:
        assert b"".join(map(model.piece, model.tokenize(text))).decode() == text


def test_special_tokens(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model:
        assert model.tokenize("<|im_start|>") == [IM_START]
        assert len(model.tokenize("<|im_start|>", parse_special=False)) > 1
        assert model.piece(IM_END) == b"" and model.piece(IM_END, special=True) == b"<|im_end|>"
        assert [model.is_eog(token) for token in (IM_END, ENDOFTEXT, 65)] == [True, True, False]


def test_closing_twice_is_harmless(tiny_moe: Path) -> None:
    model = Model.load(tiny_moe)
    model.close()
    model.close()


def test_render_chat(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model:
        text = model.render_chat([{"role": "system", "content": "Be brief."}, *TURN])
        assert text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert not model.render_chat(TURN, add_assistant=False).endswith("assistant\n")


def test_a_model_without_template_gets_chatml() -> None:
    assert ChatFormat(None).render(TURN) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_system_role_gets_it_in_the_first_message() -> None:
    strict = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    )
    rendered = ChatFormat(strict, bos="<s>").render([{"role": "system", "content": "Be brief."}, *TURN])
    assert rendered == "<s>[Be brief.\n\nHi]"
    with pytest.raises(EngineError, match="no system role"):
        ChatFormat(strict).render([{"role": "system", "content": "Be brief."}])


def test_template_extensions() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatFormat(template).render(TURN * 2) == '{"role": "user", "content": "Hi"}4'


def test_templates_are_sandboxed_and_checked() -> None:
    with pytest.raises(EngineError, match="Cannot parse"):
        ChatFormat("{% for %}")
    with pytest.raises(EngineError, match="rejects"):
        ChatFormat("{{ messages.__class__.__mro__ }}").render(TURN)


def test_same_vocabulary(tiny_moe: Path, tiny_draft: Path) -> None:
    with Model.load(tiny_moe) as target, Model.load(tiny_draft) as draft:
        assert check_compatible(target, draft) == N_VOCAB


def test_another_vocabulary_names_the_tokens(tiny_moe: Path, tiny_draft: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = tiny_draft.read_bytes()
    assert data.count(b"<|im_start|>") >= 1
    other.write_bytes(data.replace(b"<|im_start|>", b"<|imstart_|>"))
    with Model.load(tiny_moe) as target, Model.load(other) as draft:
        expected = rf"token {IM_START} is '<\|imstart_\|>' in the draft and '<\|im_start\|>' in the model"
        with pytest.raises(VocabularyMismatchError, match=expected) as caught:
            check_compatible(target, draft)
        assert caught.value.exit_code == 2


def test_context_size_follows_free_memory(tiny: TinyFactory) -> None:
    with Model.load(tiny("qwen3moe")) as loaded:
        model = ModelMemory.of(loaded)
        per_token = model.kv_bytes(1)
        assert per_token == 3 * 2 * (16 + 16) * 2  # layers x kv heads x (key + value) x float16
        assert choose_n_ctx([model], free_bytes=2**40) == (4096, None)
        size, note = choose_n_ctx([model, model], free_bytes=per_token * 4 * 1000)
        assert size == 768 and note is not None and "instead of the 4,096" in note
        assert choose_n_ctx([model], free_bytes=0)[0] == 256
        assert choose_n_ctx([model, model], 1000, free_bytes=2 * 1000 * per_token) == (1000, None)
        with pytest.raises(InputError, match=r"1,001 tokens needs .* Use -c 768 or less"):
            choose_n_ctx([model, model], 1001, free_bytes=2 * 1000 * per_token)


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
    with Model.load(tiny_moe, experts_on_cpu=True, storage=storage):
        pass
    assert asked == [repacked]
