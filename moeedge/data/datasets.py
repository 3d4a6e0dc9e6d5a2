"""The prompt sets that `--dataset` knows by name, and where each is looked up: $MOEEDGE_DATA, the cache, the hub."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path

from moeedge import paths
from moeedge.data.parsers import (
    PARQUET_HINT,
    Parser,
    parse_articles,
    parse_custom,
    parse_gsm8k,
    parse_humaneval,
    parse_instructions,
    parse_mmlu_pro,
    parse_questions,
    parse_turns,
    read_rows,
    reads_parquet,
)
from moeedge.data.prompts import Dataset, Place, join_datasets
from moeedge.errors import DatasetError, DownloadError
from moeedge.hub.remote import fetch_dataset_file, hub_endpoint

SAMPLE = "sample"
TOY = "toy"
CALIBRATION = "calibration"
_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
_TOY_ANSWER_TOKENS = 160  # the longest of the generator's answers
_OFFLINE_HINT = "Use --offline-sample for moeedge's own small set."
_SPECULATION = "RedHatAI/speculator_benchmarks"


@dataclass(frozen=True)
class DatasetFile:
    """One file of a dataset repository on the hub."""

    repo: str
    file: str
    variant: str  # one line: the content of this file
    revision: str = "main"


@dataclass(frozen=True)
class DatasetEntry:
    """One prompt set of the catalog."""

    name: str
    about: str
    files: tuple[str, ...]  # its names in $MOEEDGE_DATA and in the cache; the first is the original's
    parse: Parser
    hub: tuple[DatasetFile, ...]  # tried in this order
    original: str  # where to get it by hand
    unscored: str = ""  # why its answers have no reference, if they have none
    answer_tokens: int = 512  # typical maximum of a complete answer


_ENTRIES = (
    DatasetEntry(
        name="mtbench",
        about="MT-bench, 80 two-turn questions in 8 categories",
        files=("mt_bench_question.jsonl", "mt_bench.jsonl"),
        parse=parse_turns,
        hub=(
            DatasetFile(
                "HuggingFaceH4/mt_bench_prompts",
                "raw/question.jsonl",
                "MT-bench, 80 questions",
                revision="e3a795c5e9a82ee40611c416b8a7786c73198991",
            ),
        ),
        original="https://github.com/lm-sys/FastChat (fastchat/llm_judge/data/mt_bench/question.jsonl)",
        unscored="MT-bench's answers are judged by another model, not by a rule",
    ),
    DatasetEntry(
        name="humaneval",
        about="HumanEval, 164 Python functions to complete",
        files=("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        parse=parse_humaneval,
        hub=(
            DatasetFile(_SPECULATION, "HumanEval.jsonl", "HumanEval, 164 functions"),
            DatasetFile(
                "bigcode/humanevalpack",
                "data/python/data/humanevalpack.jsonl",
                "HumanEvalPack's Python part, the prompts of HumanEval",
            ),
        ),
        original="https://github.com/openai/human-eval (data/HumanEval.jsonl.gz)",
    ),
    DatasetEntry(
        name="gsm8k",
        about="GSM8K, 1,319 grade school sums in words",
        files=("gsm8k_test.jsonl",),
        parse=parse_gsm8k,
        hub=(
            DatasetFile("DaertML/gsm8k-jsonl", "test.jsonl", "GSM8K's test part, 1,319 questions"),
            DatasetFile(
                _SPECULATION,
                "math_reasoning.jsonl",
                "the mathematical reasoning part of a speculation benchmark, 80 questions taken from GSM8K",
            ),
        ),
        original="https://github.com/openai/grade-school-math (grade_school_math/data/test.jsonl)",
    ),
    DatasetEntry(
        name="mmlu-pro",
        about="MMLU-Pro, multiple choice in 14 subjects",
        files=("mmlu_pro_test.parquet", "mmlu_pro_test.jsonl", "mmlu_pro.jsonl", "mmlu_pro_140.jsonl"),
        parse=parse_mmlu_pro,
        hub=(
            DatasetFile(
                "TIGER-Lab/MMLU-Pro", "data/test-00000-of-00001.parquet", "MMLU-Pro's test part, 12,032 questions"
            ),
        ),
        original="https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro (data/test-00000-of-00001.parquet)",
        answer_tokens=1024,
    ),
    DatasetEntry(
        name="alpaca",
        about="252 user-written instructions of self-instruct, in place of Alpaca's",
        files=("self_instruct_user_oriented_252.jsonl", "user_oriented_instructions.jsonl"),
        parse=parse_instructions,
        hub=(
            DatasetFile(
                "HuggingFaceH4/self-instruct-eval", "human-eval.jsonl", "self-instruct's 252 user-oriented instructions"
            ),
        ),
        original="https://github.com/yizhongw/self-instruct (human_eval/user_oriented_instructions.jsonl)",
        unscored="these instructions are open, and their answers are judged by people",
    ),
    DatasetEntry(
        name="cnndm",
        about="CNN/DailyMail, 80 articles to summarise",
        files=("eagle_sum_question.jsonl", "cnndm.jsonl"),
        parse=parse_articles,
        hub=(
            DatasetFile(
                _SPECULATION,
                "summarization.jsonl",
                "80 articles of CNN/DailyMail as in the usual speculation benchmarks",
            ),
        ),
        original="https://github.com/SafeAILab/EAGLE (eagle/data/sum/question.jsonl)",
        answer_tokens=256,
    ),
    DatasetEntry(
        name="qa",
        about="Natural Questions, 80 short questions",
        files=("eagle_qa_question.jsonl", "qa.jsonl"),
        parse=parse_questions,
        hub=(
            DatasetFile(
                _SPECULATION, "qa.jsonl", "80 questions of Natural Questions as in the usual speculation benchmarks"
            ),
        ),
        original="https://github.com/SafeAILab/EAGLE (eagle/data/qa/question.jsonl)",
        unscored="this file has questions without answers",
        answer_tokens=256,
    ),
)

CATALOG: dict[str, DatasetEntry] = {entry.name: entry for entry in _ENTRIES}


def dataset_names() -> tuple[str, ...]:
    """Returns the names that `--dataset` takes, in the order of the catalog."""
    return tuple(CATALOG)


def load_dataset(name: str, *, offline_sample: bool = False) -> Dataset:
    """Loads the prompt set `name`: one of `dataset_names()`, "sample", "toy", or the path of a file.

    offline_sample: do not ask the hub; a set that neither $MOEEDGE_DATA nor the cache has is replaced by moeedge's own
    sample, under the sample's name. Raises DatasetError for an unknown, absent or malformed set, DownloadError if the
    hub cannot provide it.
    """
    if name == SAMPLE:
        return load_sample()
    if name == TOY:
        return load_toy()
    if name.lower() in CATALOG:
        return _load_entry(CATALOG[name.lower()], offline_sample)
    if name.endswith(_FILE_SUFFIXES):
        path = Path(name).expanduser()
        stem = path.name.split(".jsonl")[0].removesuffix(".json").removesuffix(".csv").removesuffix(".parquet")
        return _read(stem, path, parse_custom, "file", "the user's own file")
    known = ", ".join((*dataset_names(), SAMPLE, TOY))
    raise DatasetError(f"Unknown dataset '{name}'.", f"Choose from: {known}, or give the path of a .jsonl file.")


def load_datasets(names: str, *, offline_sample: bool = False) -> Dataset:
    """Loads the prompt sets of a comma-separated list as one set; its categories are then the sets.

    Raises what `load_dataset` raises, and DatasetError for an empty list or a set that is named twice.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed or len(set(listed)) < len(listed):
        raise DatasetError(f'"{names}" is not a list of different datasets.', "Separate names by commas.")
    sets = [load_dataset(name, offline_sample=offline_sample) for name in listed]
    # two absent sets are replaced by parts of one sample, under one name
    found = {dataset.name: dataset for dataset in sets}
    if len(found) < len(sets):
        raise DatasetError("Several of the datasets are not on this machine.", "Leave out --offline-sample.")
    return join_datasets(sets)


def load_sample(kind: str | None = None) -> Dataset:
    """Loads moeedge's own prompts, or only those in the style of the set `kind`."""
    sample = _packaged(SAMPLE, "moeedge's own small set of prompts")
    if kind is None:
        return sample
    chosen = tuple(prompt for prompt in sample.prompts if prompt.id.startswith(f"{kind}-"))
    return replace(sample, prompts=chosen, variant=f"{sample.variant}, those like {kind}")


def load_toy() -> Dataset:
    """Loads prompts of the domains that the bundled pair was trained on, held out of its training data.

    They are `held_back(42, "toy")` of models/generator, by domain and without the system messages
    (`python -m models.toy`).
    """
    return replace(_packaged(TOY, "prompts that the bundled toy model can answer"), answer_tokens=_TOY_ANSWER_TOKENS)


def load_calibration() -> Dataset:
    """Loads the tasks by which expert budgets of the bundled pair, and of models widened from it, are chosen.

    Held-out prompts as in the set "toy", none of which is here, without programs (`python -m models.toy
    --calibration`). Not among the sets that `load_dataset` knows: figures about a chosen budget must come from others.
    """
    return replace(_packaged(CALIBRATION, "tasks that expert budgets are chosen by"), answer_tokens=_TOY_ANSWER_TOKENS)


def _packaged(name: str, about: str) -> Dataset:
    with as_file(files("moeedge.data") / f"{name}.jsonl") as path:
        return _read(name, path, parse_custom, "package", about)


def _load_entry(entry: DatasetEntry, offline_sample: bool) -> Dataset:
    searched = []
    for place, folder, names, variant in _folders(entry):
        for name in names:
            if (folder / name).is_file():
                return _read_entry(entry, folder / name, place, variant)
        searched.append(str(folder))
    if offline_sample:
        return load_sample(entry.name)

    places = ", ".join(searched)
    if paths.data_dir() is None:
        places += " ($MOEEDGE_DATA is not set)"
    by_hand = f"Or get it from {entry.original} and save it as {entry.files[0]} in the folder that $MOEEDGE_DATA names."
    path, source = _from_hub(entry, f"The dataset {entry.name} is not in {places}", by_hand)
    return _read_entry(entry, path, "hub", source.variant)


def _from_hub(entry: DatasetEntry, absent: str, hint: str) -> tuple[Path, DatasetFile]:
    """Downloads the first of the hub's files that works; `absent` and `hint` complete the error if none does."""
    readable = [source for source in entry.hub if reads_parquet() or not source.file.endswith(".parquet")]
    if not readable:
        raise DatasetError(
            f"{absent}, and the hub's Parquet file needs the package pyarrow.", f"{PARQUET_HINT} {hint} {_OFFLINE_HINT}"
        )
    failures = []
    for source in readable:
        try:
            return fetch_dataset_file(source.repo, source.file, source.revision, _hub_folder(source)), source
        except DownloadError as error:
            failures.append(error.message)
    raise DownloadError(
        f"{absent}, and the download failed: {' '.join(failures)}",
        f"{_OFFLINE_HINT} Otherwise check the network and $HF_ENDPOINT ({hub_endpoint()}). {hint}",
    )


def _folders(entry: DatasetEntry) -> Iterator[tuple[Place, Path, tuple[str, ...], str]]:
    """Yields the local folders in search order: place, folder, file names of the set there, and their content."""
    data = paths.data_dir()
    if data is not None:
        yield "environment", data, entry.files, entry.about
        yield "environment", data / "prompts", entry.files, entry.about
    yield "cache", _cache(), entry.files, entry.about
    for source in entry.hub:
        yield "cache", _hub_folder(source), (source.file,), source.variant


def _cache() -> Path:
    return paths.cache_dir() / "datasets"


def _hub_folder(source: DatasetFile) -> Path:
    return _cache() / source.repo.replace("/", "--")


def _read_entry(entry: DatasetEntry, path: Path, place: Place, variant: str) -> Dataset:
    read = _read(entry.name, path, entry.parse, place, variant)
    return replace(read, unscored=entry.unscored, answer_tokens=entry.answer_tokens)


def _read(name: str, path: Path, parse: Parser, place: Place, variant: str) -> Dataset:
    prompts = [parse(row) for row in read_rows(path)]
    seen: Counter[str] = Counter()
    for index, prompt in enumerate(prompts):  # ids must be unique: answers refer to prompts by id
        seen[prompt.id] += 1
        if seen[prompt.id] > 1:
            prompts[index] = replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Dataset(name, tuple(prompts), place, path, digest, variant)
