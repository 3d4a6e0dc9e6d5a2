"""The prompt sets that `--dataset` knows by name, and where each is looked up: $MOEEDGE_DATA, the cache, the hub.

Also the texts that perplexity is measured on: the bundled pair's own, and files of the user's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeedge import paths
from moeedge.data import prompts as parsers
from moeedge.data.prompts import Dataset, EvaluationText, Place, join_datasets
from moeedge.errors import DatasetError, DownloadError
from moeedge.hub.remote import fetch_dataset_file, hub_endpoint

SAMPLE = "sample"
TOY = "toy"
CALIBRATION = "calibration"
_FOLDER = Path(__file__).parent  # of the sets that come with moeedge
_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
_TOY_ANSWER_TOKENS = 160  # the longest of the generator's answers
_OFFLINE_HINT = "Use --offline-sample for moeedge's own small set."
_SPECULATION = "RedHatAI/speculator_benchmarks"


@dataclass(frozen=True)
class DatasetFile:
    repo: str
    file: str
    variant: str  # one line: the content of this file
    revision: str = "main"


@dataclass(frozen=True)
class DatasetEntry:
    """One prompt set of the catalog."""

    name: str
    parse: parsers.Parser
    about: str
    files: tuple[str, ...]  # its names in $MOEEDGE_DATA and in the cache; the first is the original's
    original: str  # where to get it by hand
    hub: tuple[DatasetFile, ...]  # tried in this order
    unscored: str = ""  # why its answers have no reference, if they have none
    answer_tokens: int = 512  # typical maximum of a complete answer


_ENTRIES = (
    DatasetEntry(
        "mtbench", parsers.parse_turns, "MT-bench, 80 two-turn questions in 8 categories",
        ("mt_bench_question.jsonl", "mt_bench.jsonl"),
        "https://github.com/lm-sys/FastChat (fastchat/llm_judge/data/mt_bench/question.jsonl)",
        (DatasetFile("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", "MT-bench, 80 questions",
                     revision="e3a795c5e9a82ee40611c416b8a7786c73198991"),),
        unscored="MT-bench's answers are judged by another model, not by a rule",
    ),
    DatasetEntry(
        "humaneval", parsers.parse_humaneval, "HumanEval, 164 Python functions to complete",
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        "https://github.com/openai/human-eval (data/HumanEval.jsonl.gz)",
        (DatasetFile(_SPECULATION, "HumanEval.jsonl", "HumanEval, 164 functions"),
         DatasetFile("bigcode/humanevalpack", "data/python/data/humanevalpack.jsonl",
                     "HumanEvalPack's Python part, the prompts of HumanEval")),
    ),
    DatasetEntry(
        "gsm8k", parsers.parse_gsm8k, "GSM8K, 1,319 grade school sums in words", ("gsm8k_test.jsonl",),
        "https://github.com/openai/grade-school-math (grade_school_math/data/test.jsonl)",
        (DatasetFile("DaertML/gsm8k-jsonl", "test.jsonl", "GSM8K's test part, 1,319 questions"),
         DatasetFile(_SPECULATION, "math_reasoning.jsonl",
                     "the mathematical reasoning part of a speculation benchmark, 80 questions taken from GSM8K")),
    ),
    DatasetEntry(
        "mmlu-pro", parsers.parse_mmlu_pro, "MMLU-Pro, multiple choice in 14 subjects",
        ("mmlu_pro_test.parquet", "mmlu_pro_test.jsonl", "mmlu_pro.jsonl", "mmlu_pro_140.jsonl"),
        "https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro (data/test-00000-of-00001.parquet)",
        (DatasetFile("TIGER-Lab/MMLU-Pro", "data/test-00000-of-00001.parquet",
                     "MMLU-Pro's test part, 12,032 questions"),),
        answer_tokens=1024,
    ),
    DatasetEntry(
        "alpaca", parsers.parse_instructions, "252 user-written instructions of self-instruct, in place of Alpaca's",
        ("self_instruct_user_oriented_252.jsonl", "user_oriented_instructions.jsonl"),
        "https://github.com/yizhongw/self-instruct (human_eval/user_oriented_instructions.jsonl)",
        (DatasetFile("HuggingFaceH4/self-instruct-eval", "human-eval.jsonl",
                     "self-instruct's 252 user-oriented instructions"),),
        unscored="these instructions are open, and their answers are judged by people",
    ),
    DatasetEntry(
        "cnndm", parsers.parse_articles, "CNN/DailyMail, 80 articles to summarise",
        ("eagle_sum_question.jsonl", "cnndm.jsonl"),
        "https://github.com/SafeAILab/EAGLE (eagle/data/sum/question.jsonl)",
        (DatasetFile(_SPECULATION, "summarization.jsonl",
                     "80 articles of CNN/DailyMail as in the usual speculation benchmarks"),),
        answer_tokens=256,
    ),
    DatasetEntry(
        "qa", parsers.parse_questions, "Natural Questions, 80 short questions", ("eagle_qa_question.jsonl", "qa.jsonl"),
        "https://github.com/SafeAILab/EAGLE (eagle/data/qa/question.jsonl)",
        (DatasetFile(_SPECULATION, "qa.jsonl",
                     "80 questions of Natural Questions as in the usual speculation benchmarks"),),
        unscored="this file has questions without answers",
        answer_tokens=256,
    ),
)  # fmt: skip

CATALOG: dict[str, DatasetEntry] = {entry.name: entry for entry in _ENTRIES}


def load_dataset(name: str, *, offline_sample: bool = False) -> Dataset:
    """Loads the prompt set `name`: one of CATALOG, "sample", "toy", or the path of a file.

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
        path = paths.user_path(name)
        stem = path.name.split(".jsonl")[0].removesuffix(".json").removesuffix(".csv").removesuffix(".parquet")
        return _read(stem, path, parsers.parse_custom, "file", "the user's own file")
    names = ", ".join((*CATALOG, SAMPLE, TOY))
    raise DatasetError(f"Unknown dataset '{name}'.", f"Choose from: {names}, or give the path of a .jsonl file.")


def load_datasets(names: str, *, offline_sample: bool = False) -> Dataset:
    """Loads the prompt sets of a comma-separated list as one set; its categories are then the sets.

    Raises what `load_dataset` raises, and DatasetError for an empty list or a set that is named twice.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed or len({name.lower() if name.lower() in CATALOG else name for name in listed}) < len(listed):
        raise DatasetError(f'"{names}" is not a list of different datasets.', "Separate names by commas.")
    sets = [load_dataset(name, offline_sample=offline_sample) for name in listed]
    repeated = [name for name, n in Counter(dataset.name for dataset in sets).items() if n > 1]
    if SAMPLE in repeated:  # two absent sets are parts of one sample
        raise DatasetError("Several of the datasets are not on this machine.", "Leave out --offline-sample.")
    if repeated:
        raise DatasetError(f"Two of the datasets are named {repeated[0]}.", "Rename a file.")
    return join_datasets(sets)


def load_sample(kind: str | None = None) -> Dataset:
    """Loads moeedge's own prompts, or only those in the style of the set `kind`."""
    sample = _packaged(SAMPLE, "moeedge's own small set of prompts")
    if kind is None:
        return sample
    alike = tuple(prompt for prompt in sample.prompts if prompt.id.startswith(f"{kind}-"))
    return replace(sample, prompts=alike, variant=f"{sample.variant}, those like {kind}")


def load_toy() -> Dataset:
    """Loads prompts of the bundled pair's domains, held out of its training data (made by `python -m models.toy`)."""
    return _packaged(TOY, "prompts that the bundled toy model can answer", answer_tokens=_TOY_ANSWER_TOKENS)


def load_calibration() -> Dataset:
    """Loads the tasks by which expert budgets of the bundled pair, and of models widened from it, are chosen.

    Held-out prompts as in the set "toy", none of which is here, without programs. `load_dataset` has no such set:
    figures about a chosen budget must come from others (made by `python -m models.toy --calibration`).
    """
    return _packaged(CALIBRATION, "tasks that expert budgets are chosen by", answer_tokens=_TOY_ANSWER_TOKENS)


def load_text(name: str) -> EvaluationText:
    """Loads "toy" (chats of the bundled pair's domains, held out of its training data) or a file of UTF-8 text.

    The toy text is `python -m models.toy --text`. Raises DatasetError for an absent, empty or unreadable file.
    """
    path = paths.user_path(name)
    return _read_text(TOY, _FOLDER / "toy.txt") if name == TOY else _read_text(path.name, path)


def load_calibration_text() -> EvaluationText:
    """Loads the text that chooses expert budgets of other models; figures about a budget must come from other texts."""
    return _read_text(CALIBRATION, _FOLDER / "calibration.txt")


def _read_text(name: str, path: Path) -> EvaluationText:
    text = parsers.read_text(path)
    if not text.strip():
        raise DatasetError(f"The text {path} is empty.", f'Name a file of UTF-8 text, or "{TOY}".')
    return EvaluationText(name, text, hashlib.sha256(path.read_bytes()).hexdigest())


def _packaged(name: str, about: str, **facts: Any) -> Dataset:
    return _read(name, _FOLDER / f"{name}.jsonl", parsers.parse_custom, "package", about, **facts)


def _load_entry(entry: DatasetEntry, offline_sample: bool) -> Dataset:
    def read(path: Path, place: Place, variant: str) -> Dataset:
        facts = {"unscored": entry.unscored, "answer_tokens": entry.answer_tokens}
        return _read(entry.name, path, entry.parse, place, variant, **facts)

    data, cache = paths.data_dir(), paths.cache_dir() / "datasets"
    hub = [(source, cache / source.repo.replace("/", "--")) for source in entry.hub]
    folders = [] if data is None else [("environment", data), ("environment", data / "prompts")]
    # place, folder, names of the set there and its content, in the order of the search
    places: list[tuple[Any, Path, tuple[str, ...], str]]
    places = [(*place, entry.files, entry.about) for place in (*folders, ("cache", cache))]
    places += [("cache", folder, (source.file,), source.variant) for source, folder in hub]
    for place, folder, names, variant in places:
        for name in names:
            if (folder / name).is_file():
                return read(folder / name, place, variant)
    if offline_sample:
        return load_sample(entry.name)

    absent = f"The dataset {entry.name} is not in {', '.join(str(folder) for _, folder, _, _ in places)}"
    absent += " ($MOEEDGE_DATA is not set)" if data is None else ""
    hint = f"Or get it from {entry.original} and save it as {entry.files[0]} in the folder that $MOEEDGE_DATA names."
    readable = [pair for pair in hub if parsers.reads_parquet() or not pair[0].file.endswith(".parquet")]
    if not readable:
        hint = f"{parsers.PARQUET_HINT} {hint} {_OFFLINE_HINT}"
        raise DatasetError(f"{absent}, and the hub's Parquet file needs the package pyarrow.", hint)
    failures = []
    for source, folder in readable:
        try:
            return read(fetch_dataset_file(source.repo, source.file, source.revision, folder), "hub", source.variant)
        except DownloadError as error:
            failures.append(error.message)
    hint = f"{_OFFLINE_HINT} Otherwise check the network and $HF_ENDPOINT ({hub_endpoint()}). {hint}"
    raise DownloadError(f"{absent}, and the download failed: {' '.join(failures)}", hint)


def _read(name: str, path: Path, parse: parsers.Parser, place: Place, variant: str, **facts: Any) -> Dataset:
    prompts = [parse(row) for row in parsers.read_rows(path)]
    taken, n_seen = {prompt.id for prompt in prompts}, Counter[str]()
    for index, prompt in enumerate(prompts):  # ids must be unique: answers refer to prompts by id
        new, n_seen[prompt.id] = prompt.id, n_seen[prompt.id] + 1
        while new in taken and n_seen[prompt.id] > 1:
            new = f"{prompt.id}#{n_seen[prompt.id]}"
            n_seen[prompt.id] += new in taken
        taken.add(new)
        prompts[index] = replace(prompt, id=new)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Dataset(name, tuple(prompts), place, path, digest, variant, **facts)
