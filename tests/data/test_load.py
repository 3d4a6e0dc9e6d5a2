"""The places of `--dataset`: the data folder, the cache, the hub (a local server, the real client), our sample."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from models.generator import DOMAINS, held_back
from models.toy import calibration_rows
from moeedge.data.datasets import CATALOG, load_calibration, load_dataset, load_datasets
from moeedge.data.prompts import Dataset
from moeedge.errors import DatasetError, DownloadError, InputError
from tests.support.hub import local_hub

_MT_BENCH = json.dumps({"question_id": 7, "category": "writing", "turns": ["First?", "And then?"]}).encode() + b"\n"


@pytest.fixture(autouse=True)
def _empty_places(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    """No data folder, an empty cache, and a hub that does not answer, on any machine."""
    monkeypatch.delenv("MOEEDGE_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")


def _texts(dataset: Dataset) -> list[list[str]]:
    return [[message.content for turn in prompt.turns for message in turn] for prompt in dataset.prompts]


@pytest.mark.parametrize("folder", [".", "prompts"])
def test_the_data_folder_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    target = tmp_path / "data" / folder / "mt_bench_question.jsonl"
    target.parent.mkdir(parents=True)
    target.write_bytes(_MT_BENCH)
    cached = tmp_path / "cache" / "datasets" / "mt_bench_question.jsonl"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(_MT_BENCH.replace(b"First?", b"Cached?"))
    monkeypatch.setenv("MOEEDGE_DATA", str(tmp_path / "data"))
    dataset = load_dataset("mtbench")
    assert (dataset.name, dataset.place) == ("mtbench", "environment")
    assert _texts(dataset) == [["First?", "And then?"]]
    monkeypatch.setenv("MOEEDGE_DATA", str(tmp_path / "absent"))
    assert _texts(load_dataset("mtbench")) == [["Cached?", "And then?"]]


def test_a_file_that_the_hub_does_not_have_and_a_failing_hub() -> None:
    files = {(f"datasets/{source.repo}", "another"): b"" for source in CATALOG["humaneval"].hub}
    with pytest.MonkeyPatch.context() as patch, local_hub(files) as hub:
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        with pytest.raises(DownloadError, match="404") as caught:
            load_dataset("humaneval")
        assert hub.endpoint in caught.value.message
        assert "datasets" in caught.value.message  # the places looked at
        assert "HumanEval.jsonl.gz" in caught.value.hint
        assert "--offline-sample" in caught.value.hint
        hub.status = 503
        with pytest.raises(DownloadError, match="503"):
            load_dataset("qa")


@pytest.mark.flaky(reruns=2)
def test_no_network_fails_quickly_and_names_the_folders() -> None:
    begin = time.monotonic()
    with pytest.raises(DownloadError, match="gsm8k") as caught:
        load_dataset("gsm8k")
    assert time.monotonic() - begin < 10
    assert "$MOEEDGE_DATA is not set" in caught.value.message
    assert caught.value.exit_code == 1


def test_parquet_without_pyarrow_hints_at_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeedge.data.prompts.reads_parquet", lambda: False)
    with pytest.raises(DatasetError, match="needs the package pyarrow") as caught:
        load_dataset("mmlu-pro")
    assert "TIGER-Lab/MMLU-Pro" in caught.value.hint
    assert 'pip install "moeedge[score]"' in caught.value.hint
    assert caught.value.exit_code == 2


def test_the_next_hub_file_replaces_a_missing_one_and_then_the_cache_is_used() -> None:
    source = CATALOG["gsm8k"].hub[1]
    row = json.dumps({"question_id": 1, "category": "math", "turns": ["2 + 2?"], "reference": ["#### 4"]}).encode()
    with pytest.MonkeyPatch.context() as patch, local_hub({(f"datasets/{source.repo}", source.file): row}) as hub:
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        asked, n_asked = load_dataset("gsm8k"), len(hub.requests)
        cached = load_dataset("gsm8k")
        assert len(hub.requests) == n_asked
    assert (asked.place, asked.variant) == ("hub", source.variant)
    assert (cached.place, cached.variant, cached.sha256) == ("cache", source.variant, asked.sha256)


def test_an_unknown_dataset() -> None:
    with pytest.raises(DatasetError, match="'mtbanch'") as caught:
        load_dataset("mtbanch")
    assert all(name in caught.value.hint for name in (*CATALOG, "sample", "toy"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", CATALOG)
def test_the_sample_keeps_its_own_name(name: str) -> None:
    dataset = load_dataset(name, offline_sample=True)
    assert (dataset.name, dataset.place) == ("sample", "package")
    assert len(dataset.prompts) >= 2
    assert {len(prompt.turns) for prompt in dataset.prompts} == ({2} if name == "mtbench" else {1})


def test_offline_sample_prefers_real_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b'{"task_id": "x/0", "prompt": "def f():"}\n'))
    monkeypatch.setenv("MOEEDGE_DATA", str(tmp_path))
    dataset = load_dataset("humaneval", offline_sample=True)
    assert (dataset.name, dataset.place, dataset.prompts[0].id) == ("humaneval", "environment", "x/0")


def test_a_limit_takes_prompts_of_every_category(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"id": i, "category": i // 10, "prompt": "Hi"}) + "\n" for i in range(80)))
    dataset = load_dataset(str(path))
    assert (dataset.name, dataset.place) == ("own", "file")
    assert [prompt.category for prompt in dataset.limited(8).prompts] == ["custom", *"1234567"]
    assert [prompt.id for prompt in dataset.limited(3).prompts] == ["0", "26", "53"]
    assert dataset.limited(None) is dataset.limited(100) is dataset


def test_ids_are_unique_whatever_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": "Hi"}) + "\n" for name in ("a", "a", "a#2", "a")))
    assert [prompt.id for prompt in load_dataset(str(path)).prompts] == ["a", "a#3", "a#2", "a#4"]
    with pytest.raises(DatasetError, match="named own"):
        load_datasets(f"{path},{write_again(path)}")
    with pytest.raises(InputError, match="home"):
        load_dataset("~nobody-here/x.jsonl")


def write_again(path: Path) -> Path:
    other = path.parent / "other" / path.name
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    return other


COUNTS = {"mtbench": 80, "humaneval": 164, "gsm8k": 1319, "mmlu-pro": 140, "alpaca": 252, "cnndm": 80, "qa": 80}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_the_published_files(monkeypatch: pytest.MonkeyPatch, data_folder: Path, name: str, count: int) -> None:
    monkeypatch.setenv("MOEEDGE_DATA", str(data_folder))
    dataset = load_dataset(name)
    assert len(dataset.prompts) == count
    assert len({prompt.id for prompt in dataset.prompts}) == count
    assert {len(prompt.turns) for prompt in dataset.prompts} == ({2} if name == "mtbench" else {1})


def test_the_toy_set_is_held_out_of_training() -> None:
    toy = load_dataset("toy")
    assert (toy.name, toy.place) == ("toy", "package")
    chats = held_back(42, "toy")
    chats.sort(key=lambda chat: list(DOMAINS).index(chat.domain))
    assert [prompt.category for prompt in toy.prompts] == [chat.domain for chat in chats]
    assert _texts(toy) == [[turn.user for turn in chat.turns] for chat in chats]
    given = [[reference.to_row() for reference in prompt.references if reference] for prompt in toy.prompts]
    assert given == [[turn.reference.to_row() for turn in chat.turns] for chat in chats]
    for limit in (4, 7, 9, 12):  # spread over the domains
        assert len({prompt.category for prompt in toy.limited(limit).prompts}) == min(limit, 7)


def test_the_calibration_set_is_held_out_of_the_toy_set() -> None:
    tasks = load_calibration()
    given = [json.loads(line) for line in tasks.path.read_text().splitlines()]
    assert given == calibration_rows()
    known = {tuple(texts) for texts in _texts(load_dataset("toy"))}
    assert not known & {tuple(texts) for texts in _texts(tasks)}
    scorers = {reference.scorer for prompt in tasks.prompts for reference in prompt.references if reference is not None}
    assert "code" not in scorers
    assert all(prompt.reference(turn) for prompt in tasks.prompts for turn in range(len(prompt.turns)))
    assert Counter(prompt.category for prompt in tasks.prompts) == dict.fromkeys(DOMAINS.keys() - {"code"}, 12)
