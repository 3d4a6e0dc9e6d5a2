"""The cases of the Vulkan lane, and a process that runs those of a model: python -m tests.gpu.vulkan_cases MODEL DIR S

Reads a case per line from standard input and writes a result per line to standard output, both as JSON. S: the most
seconds for a case.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.bench.config import MODES
from moeedge.engine.session import Session
from moeedge.hardware.devices import Storage
from moeedge.llama import library
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.native.abi import DevicePath
from moeedge.policies.registry import POLICIES
from moeedge.scheduler import opening
from tests.support.cases import MOE_CASES
from tests.support.commands import run
from tests.support.hybrid import assert_greedy, greedy_answer, hybrid_config, random_prompt
from tests.support.stock import StockContext
from tests.support.tiny import make_tiny
from tests.support.vulkan import DEVICE

ALL_LAYERS = 99
N_LAYERS = {"deepseek2": 3}  # its first is dense
N_LAYERS_DEFAULT = 2
N_EXPERTS = 16
MODELS = ("qwen3moe", "gpt-oss", "deepseek2", "mixtral")


@dataclass(frozen=True)
class Case:
    """What is run: a kind of test, and its settings."""

    model: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        words = [f"{key}={value}" for key, value in self.settings.items()]
        return " ".join([self.model, self.kind, *words])


def n_layers(model: str) -> int:
    return N_LAYERS.get(model, N_LAYERS_DEFAULT)


def greedy(model: str, **settings: Any) -> Case:
    """Greedy answers that must equal stock's with the same layers on the device."""
    defaults = {
        "ngl": ALL_LAYERS,
        "ratio": 0.5,
        "gamma": 4,
        "draft": "device",
        "policy": "spac",
        "prompt": 10,
        "predict": 6,
    }
    return Case(model, "greedy", defaults | settings)


def all_cases() -> list[Case]:
    """The entire lane; a model's cases are neighbours."""
    cases = []
    for model in MODELS:
        half = (n_layers(model) + 1) // 2 + 1  # the output layer counts as one
        cases += [greedy(model, ngl=ngl) for ngl in (1, half, ALL_LAYERS)]
        cases += [greedy(model, ratio=ratio, ngl=half) for ratio in (0.17, 1.0)]
        cases += [greedy(model, gamma=gamma, ngl=half) for gamma in (0, 8)]
        cases += [greedy(model, draft="cpu", ngl=half)]
        cases += [greedy(model, path=path, ratio=1.0) for path in ("pairs", "columns", "ahead")]
        cases += [greedy(model, prefill=path, prompt=70, predict=3) for path in ("cpu", "resident", "stream")]
        cases += [greedy(model, in_ram=0.3, ratio=0.17, path=path, ngl=half) for path in ("pairs", "columns", "ahead")]
        cases += [
            greedy(model, in_ram=0.3, prefill=path, prompt=70, predict=3) for path in ("cpu", "resident", "stream")
        ]
        cases += [Case(model, kind) for kind in ("calibrate", "profile", "chat", "bench")]
    return cases


def slice_cases() -> list[Case]:
    """What the default suite runs."""
    return [
        greedy("qwen3moe", predict=4),
        greedy("qwen3moe", ngl=1, ratio=1.0, draft="cpu", predict=4),
        Case("qwen3moe", "chat"),
    ]


def fuzz_case(seed: int) -> Case:
    """Random settings, all independent. A prompt of a length is always the same: stock answers it once."""
    rng = np.random.default_rng(seed)

    def pick(values: Any) -> Any:
        values = list(values)
        return values[int(rng.integers(len(values)))]

    model = pick(MODELS)
    settings = {
        "seed": seed,
        "ngl": pick([*range(n_layers(model) + 1), ALL_LAYERS]),
        "ratio": pick((0.05, 0.17, 0.3, 0.5, 0.8, 1.0)),
        "gamma": pick((0, 1, 2, 4, 8)),
        "draft": pick(("device", "cpu", "ngram")),
        "policy": pick(POLICIES),
        "prompt": pick((1, 2, 9, 17, 31, 70)),  # tokens
        "prefill": pick(("cpu", "resident", "stream")),
        "path": pick(("pairs", "columns", "ahead")),  # of small batches on the device
        "predict": 4,
    }
    return Case(model, "fuzz", settings)


def fuzz_cases(n_cases: int, first_seed: int = 0) -> list[Case]:
    """The cases of that many seeds, by model, so that each model's kernels are compiled once."""
    cases = [fuzz_case(first_seed + i) for i in range(n_cases)]
    return sorted(cases, key=lambda case: MODELS.index(case.model))


class ModelCases:
    """Runs the cases of one model; models and stock's answers are kept."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        arch, dimensions = MOE_CASES[name]
        folder.mkdir(parents=True, exist_ok=True)
        self.path = make_tiny(arch, folder, **(dimensions | {"experts": N_EXPERTS, "layers": n_layers(name)}))
        self.draft_path = make_tiny("qwen3", folder, layers=1)
        self._models: dict[tuple[Path, int, Storage], Model] = {}
        self._stocks: dict[int, StockContext] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """The figures of a case; raises AssertionError where it fails."""
        return getattr(self, f"_{case.kind}")(**case.settings)

    def model(self, path: Path, n_gpu_layers: int, storage: Storage = "loaded") -> Model:
        """Loaded once; the process's end frees it."""
        key = (path, n_gpu_layers, storage)
        if key not in self._models:
            split = {"n_gpu_layers": n_gpu_layers, "device": DEVICE, "experts_on_cpu": path == self.path}
            self._models[key] = Model.load(path, storage=storage, **split)  # type: ignore[arg-type]
        return self._models[key]

    @contextmanager
    def session(
        self, ngl: int, ratio: float, draft: str, gamma: int, in_ram: float = 0.0, **placement: Any
    ) -> Iterator[Session]:
        """A session with that split; draft: on the "device", the "cpu", or "ngram".

        in_ram: share of the experts with a slot in RAM, into which those are loaded that the device lacks; 0: off.
        """
        with ExitStack() as stack:
            draft_path: Any = self.draft_path if draft in ("device", "cpu") else draft
            config = hybrid_config(self.path, draft_path, ratio, gamma=max(gamma, 1), device=DEVICE, **placement)
            config = replace(config, n_gpu_layers=ngl)
            if in_ram:
                config = replace(config, ram=int(in_ram * expert_bytes(expert_tensors(self.path)[0])))
            loaded = None
            if draft in ("device", "cpu"):
                loaded = self.model(self.draft_path, ALL_LAYERS if draft == "device" else 0)
            target = self.model(self.path, ngl, "on demand" if in_ram else "loaded")
            session = stack.enter_context(Session.open(config, model=target, draft_model=loaded))
            session.gamma = gamma
            yield session

    def _greedy(
        self,
        *,
        ngl: int,
        ratio: float,
        gamma: int,
        draft: str,
        policy: str,
        prompt: int,
        predict: int,
        path: str = "pairs",
        in_ram: float = 0.0,
        **placement: Any,
    ) -> dict[str, Any]:
        tokens = random_prompt(prompt, prompt)
        placement |= {"policy": policy, "device_path": DevicePath[path.upper()]}
        stock, ties = self._stock(ngl), []
        expected = stock.answer(tokens, predict)
        with self.session(ngl, ratio, draft, gamma, in_ram, **placement) as session:
            for turn in range(2):  # while the cache fills, and when it is warm
                answer = greedy_answer(session, tokens, predict)
                assert_greedy(stock, tokens, answer, expected, f"turn {turn}")
                ties += [answer] if answer != expected else []
            stats = session.placement_stats()
        figures: dict[str, Any] = {"near_ties": ties}
        if stats is not None:
            assert not stats.lost and stats.blocks_unknown == 0, stats
            figures |= {"pairs_hit": stats.pairs_hit, "pairs": stats.pairs}
            assert (stats.ram is not None) == (in_ram > 0), session.info.notes
            if stats.ram is not None:
                assert stats.ram.pairs > 0 and stats.ram.blocks_unknown == 0, stats.ram
                figures |= {"ram_loads": stats.ram.uploads, "ram_pairs": stats.ram.pairs}
        return figures

    def _stock(self, ngl: int) -> StockContext:
        """With the same layers on the device, in the same process; kept."""
        if ngl not in self._stocks:
            split = {"gpu": DEVICE, "n_gpu_layers": ngl, "experts_on_cpu": True}
            self._stocks[ngl] = StockContext(self.path, n_ctx=512, **split)  # type: ignore[arg-type]
        return self._stocks[ngl]

    def _calibrate(self) -> dict[str, Any]:
        """Measured as at a first start, and what is done with it."""
        with self.session(ALL_LAYERS, 0.5, "device", 4) as session:
            assert session.calibration is None
        config = hybrid_config(self.path, self.draft_path, 0.5, gamma=4, device=DEVICE)
        config = replace(config, n_gpu_layers=ALL_LAYERS, placement=replace(config.placement, calibrate=True))
        models = {"model": self.model(self.path, ALL_LAYERS), "draft_model": self.model(self.draft_path, ALL_LAYERS)}
        with Session.open(config, **models) as session:
            assert session.calibration is not None, session.info.notes
            assert session.calibration.speed > 0
            return {"speed": session.calibration.speed, "pays": session.calibration.pays}

    def _command(self, *arguments: object) -> Any:
        """The JSON of a command with this model on the device."""
        files = ["-m", self.path, "-md", self.draft_path, "-dev", DEVICE, "-t", "1"]
        result = run(*arguments[:1], *files, *arguments[1:], "-o", "json")
        assert result.exit_code == 0, result.stderr[-2000:]
        return json.loads(result.stdout)

    def _chat(self) -> dict[str, Any]:
        options = ["-p", "tell me", "--temp", "0", "-n", "4", "-c", "256", "--raw", "--no-calibrate"]
        placed = self._command("chat", *options, "--cache-ratio", "0.5", "-ngl", ALL_LAYERS)
        alone = self._command("chat", *options, "--cache-ratio", "0", "-ngl", "0", "--draft-max", "0")
        assert placed["stats"]["device"].startswith(DEVICE)
        assert len(placed["tokens"]) == len(alone["tokens"]) == 4
        return {"hit_rate_pairs": placed["stats"]["hit_rate_pairs"], "equals_cpu": placed["tokens"] == alone["tokens"]}

    def _profile(self) -> dict[str, Any]:
        options = ["-p", "one two", "-c", "256", "-n", "4", "--raw", "--draft-max", "2", "--no-calibrate"]
        report = self._command("profile", *options, "--cache-ratio", "0.5", "-ngl", ALL_LAYERS)
        assert report["steps"] > 0
        return {"steps": report["steps"]}

    def _bench(self) -> dict[str, Any]:
        talk = self.folder / "talk.jsonl"
        talk.write_text('{"prompt": "Hi."}\n')
        options = ["--dataset", talk, "-n", "3", "-r", "1", "-c", "256", "--draft-max", "2", "--no-calibrate"]
        rows = self._command("bench", "--modes", ",".join(MODES), *options, "--cache-ratio", "0.5")
        assert {row["mode"] for row in rows} <= set(MODES) and len(rows) >= 4, rows
        assert all(row["tg_ts"] is None or row["tg_ts"] > 0 for row in rows)  # a replay measures no time
        return {"modes": [row["mode"] for row in rows], "output": [row.get("output_check") for row in rows]}

    def _fuzz(self, **settings: Any) -> dict[str, Any]:
        """A greedy case with random settings, of which there are many: kernels are loaded, so nothing is warmed up."""
        settings.pop("seed")
        original, opening.warm_up_gpu = opening.warm_up_gpu, lambda *_arguments: None
        try:
            return self._greedy(**settings)
        finally:
            opening.warm_up_gpu = original


def main(arguments: list[str]) -> None:
    """Runs cases until standard input ends; one that takes longer than the limit ends the process."""
    name, folder, limit_s = arguments
    library.start()
    cases = ModelCases(name, Path(folder))
    for line in sys.stdin:
        case = Case(**json.loads(line))
        start_s = time.monotonic()
        signal.alarm(int(limit_s))
        result: dict[str, Any] = {"error": None}
        try:
            result["figures"] = cases.run(case)
        except Exception as error:  # every failure is this case's result
            result["error"] = f"{type(error).__name__}: {error}"
        result["seconds"] = round(time.monotonic() - start_s, 2)
        print(json.dumps(asdict(case) | result, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
