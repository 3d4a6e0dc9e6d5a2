"""Files that take less, nearly all, all and twice the free memory: every mode runs, and every command decides alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench.arms import NOTE, ArmsInTurn
from moeedge.bench.config import BenchMode
from moeedge.bench.experiment import BenchArm
from moeedge.cli.bench_run import make_bench_plan
from moeedge.cli.engine_options import EngineOptions
from moeedge.engine.layer_search import open_session
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import ContextTooSmallError, InputError
from moeedge.hardware.host import fits
from moeedge.llama.model import Model
from moeedge.planning.memory_map import this_machine
from moeedge.planning.planner import Planner
from moeedge.scheduler.config import PlacementConfig
from tests.bench.recording import RecordedBench, Recorder, in_ram, make_plan, run, write_conversations
from tests.support.counting import DEVICE, CountingDevice
from tests.support.machine import Here
from tests.support.tiny import make_tiny

pytestmark = pytest.mark.usefixtures("cache_folder")

RATIOS = (0.4, 0.95, 1.05, 2.0)  # weights of target and draft by the memory that is free for them
MODES = "stock-ar,stock-sd,moeedge,moeedge-ar"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 28 MB, ten times what a computation takes."""
    return make_tiny("qwen3moe", tmp_path_factory.mktemp("model"), layers=8, experts=256, expert_ff=128)


def _loaded(here: Here, ratio: float, *files: Path) -> list[Model]:
    """The models that are loaded into a memory of which the files take so much."""
    return here.set_memory_of_models(round(sum(file.stat().st_size for file in files) / ratio))


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_mode_runs_and_answers_alike(
    here: Here, tmp_path: Path, model: Path, tiny_draft: Path, ratio: float
) -> None:
    loaded = _loaded(here, ratio, model, tiny_draft)
    plan = make_plan(model, tiny_draft, modes=MODES, dataset=write_conversations(tmp_path), n_prompt=8, repetitions=1)
    placement = PlacementConfig(calibrate=False, policy="lfu")
    plan = replace(plan, base=replace(plan.base, device="none", ram="auto", n_ubatch=64, placement=placement))
    rows, recorder = run(plan)
    answers = [row for row in rows if row.output is not None]
    assert [row.mode for row in answers] == MODES.split(",")
    assert all(row.output is not None and row.output.passed for row in answers)
    tokens = {(each.mode, each.prompt, each.turn): each.tokens for each in recorder.samples if each.prompt}
    assert all(found == tokens["stock-ar", prompt, turn] for (_mode, prompt, turn), found in tokens.items())
    in_ram = {row.mode for row in answers if row.setup.device == "RAM"}
    targets = [each for each in loaded if each.path == model]
    if ratio < 1:
        assert not in_ram and [target.storage for target in targets] == ["loaded"], "one set of weights"
    else:
        assert in_ram == {"moeedge", "moeedge-ar"}
        assert {target.storage for target in targets} == {"mapped", "on demand"}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("has_draft", [False, True])
def test_chat_profile_bench_and_plan_agree_on_what_fits(
    here: Here, model: Path, tiny_draft: Path, ratio: float, has_draft: bool
) -> None:
    draft = tiny_draft if has_draft else None
    _loaded(here, ratio, *([model, tiny_draft] if has_draft else [model]))
    config = EngineConfig(model=model, draft=draft, n_ctx=256, n_ubatch=64, n_threads=1, device="none", ram="auto")
    storage = "loaded" if ratio < 1 else "on demand"
    for opened in (open_session, Session.open):  # of chat, of profile
        with opened(config) as session:
            assert session.model.storage == storage
            assert (session.info.device == "RAM") == (ratio > 1)
            assert session.draft_context is None or session.draft_context.model.storage == "loaded"
    plan = make_plan(model, draft, modes="stock-ar,moeedge", n_prompt=8)
    with RecordedBench(replace(plan, base=config), Recorder()) as bench:
        assert isinstance(bench.arms, ArmsInTurn) == (ratio > 1)
    with Planner(config, this_machine(config)) as planner:
        assert planner.loads_on_demand == (ratio > 1)
        planner._program_bytes = 0
        assert (planner.default_map().verdict == "from disk") == (ratio > 1)
    if not has_draft:
        assert EngineOptions(model=model)._exceeds_memory() == (ratio > 1)


def test_a_session_on_loaded_weights_keeps_them(here: Here, model: Path) -> None:
    """Of the file that was loaded, the rest of the memory could not hold a second copy."""
    _loaded(here, 0.75, model)
    config = EngineConfig(model=model, n_ctx=256, n_threads=1, device="none", ram="auto")
    with Session.open(config) as first, Session.open(config, model=first.model) as second:
        assert not fits(model.stat().st_size)
        assert second.placement is None and second.model is first.model


def test_a_context_without_memory_names_the_mode(here: Here, model: Path) -> None:
    _loaded(here, 0.95, model)
    plan = make_plan(model, None, modes="stock-ar,moeedge-ar", n_prompt=8, n_ctx=2**20)
    with pytest.raises(InputError, match=r"^stock-ar cannot run: .* KV cache, but .* are free") as caught:
        run(plan)
    assert caught.value.hint


def test_targets_of_their_own_need_room(here: Here, tmp_path: Path, model: Path, counting: CountingDevice) -> None:
    """Next to a GPU: modes that need weights of their own share, or are left out, with a sentence for each."""
    loaded = _loaded(here, 0.75, model)
    base = EngineConfig(
        model=model, n_threads=1, device=DEVICE, placement=PlacementConfig(vram_bytes=6_000_000, calibrate=False)
    )
    dataset = write_conversations(tmp_path, n=1)
    plan, _ = make_bench_plan(base, "stock-ar,moeedge,stock-ncmoe", dataset, n_predict=4, repetitions=1)
    rows, recorder = run(plan)
    assert [row.mode for row in rows] == ["stock-ar", "moeedge"]
    assert len(loaded) == 1
    assert sum("stock-ncmoe is left out: its own weights" in note for note in recorder.notes) == 1
    assert sum("moeedge keeps no entire layers on the GPU" in note for note in recorder.notes) == 1


def test_synthetic_tests_take_the_context_that_they_need(model: Path) -> None:
    """As llama-bench: also one that is longer than the model was trained with."""
    rows, _ = run(make_plan(model, None, modes="stock-ar", n_prompt=4500, repetitions=1, warm_up=False))
    (row,) = rows
    assert row.setup.n_ctx == 4500 and row.pp is not None
    with pytest.raises(ContextTooSmallError, match="synthetic tests need 512") as caught:
        run(make_plan(model, None, n_prompt=512, n_ctx=256))
    assert caught.value.exit_code == 2 and "-c 512" in caught.value.hint


def test_one_mode_after_the_other_has_the_memory_to_itself(
    tmp_path: Path, tiny_moe: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Session] = []
    open_alone = ArmsInTurn.open_alone

    @contextmanager
    def checked(self: ArmsInTurn, mode: BenchMode) -> Iterator[BenchArm]:
        assert not opened
        with open_alone(self, mode) as arm:
            opened.append(arm.session)
            yield arm
        opened.clear()

    monkeypatch.setattr(ArmsInTurn, "open_alone", checked)
    modes, dataset = "moeedge,stock-ar,stock-ncmoe,moeedge-ar", write_conversations(tmp_path)
    plan = make_plan(tiny_moe, tiny_draft, modes=modes, dataset=dataset, n_prompt=8, n_gen=17)
    rows, recorder = run(in_ram(plan))
    assert recorder.notes[0] == NOTE and any("stock-ncmoe" in note for note in recorder.notes)
    assert [row.mode for row in rows[:3]] == ["stock-ar", "moeedge", "moeedge-ar"]
    assert len(recorder.samples) == recorder.total
    assert {sample.repetition for sample in recorder.samples} == {0, 1}
    for row in rows:
        ours = row.mode != "stock-ar"
        assert (row.setup.device == "RAM") == ours
        assert (row.cache.wait_share is not None) == (ours and row.tg is not None)
        assert row.ratio is not None or row.ratio_pp is not None
        assert len(row.samples) == {"pp8": 2, "tg17": 4}.get(row.test, 6)
        if row.output is not None:
            assert row.output.passed and row.output.compared == 2
    assert not list((tmp_path / "cache").rglob("*-activations-*")), "runs do not warm each other"
