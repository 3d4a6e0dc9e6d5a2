"""The prompt sets that `--dataset` knows by name: file names, a source on the hub, and how their rows are read."""

from __future__ import annotations

from dataclasses import dataclass

from moeedge.data.parsers import (
    Parser,
    parse_articles,
    parse_gsm8k,
    parse_humaneval,
    parse_instructions,
    parse_mmlu_pro,
    parse_questions,
    parse_turns,
)


@dataclass(frozen=True)
class HubFile:
    """One file of a dataset repository on the hub."""

    repo: str
    file: str
    revision: str
    variant: str  # one line: what this file holds of the set


@dataclass(frozen=True)
class Entry:
    """One prompt set."""

    name: str
    about: str
    files: tuple[str, ...]  # names it may have in $MOEEDGE_DATA and in the cache, the first is the original's
    parse: Parser
    hub: tuple[HubFile, ...]  # tried one after the other; Parquet only where it can be read
    original: str  # where to get it by hand
    unscored: str = ""  # why its answers have no reference, where they have none
    answer_tokens: int = 512  # that a whole answer takes at most, as a rule


_ENTRIES = (
    Entry(
        name="mtbench",
        about="MT-bench, 80 two-turn questions in 8 categories",
        files=("mt_bench_question.jsonl", "mt_bench.jsonl"),
        parse=parse_turns,
        hub=(
            HubFile(
                "HuggingFaceH4/mt_bench_prompts",
                "raw/question.jsonl",
                "e3a795c5e9a82ee40611c416b8a7786c73198991",
                "MT-bench, 80 questions",
            ),
        ),
        original="https://github.com/lm-sys/FastChat (fastchat/llm_judge/data/mt_bench/question.jsonl)",
        unscored="MT-bench's answers are judged by another model, not by a rule",
    ),
    Entry(
        name="humaneval",
        about="HumanEval, 164 Python functions to complete",
        files=("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        parse=parse_humaneval,
        hub=(
            HubFile("RedHatAI/speculator_benchmarks", "HumanEval.jsonl", "main", "HumanEval, 164 functions"),
            HubFile(
                "bigcode/humanevalpack",
                "data/python/data/humanevalpack.jsonl",
                "main",
                "HumanEvalPack's Python part, the prompts of HumanEval",
            ),
        ),
        original="https://github.com/openai/human-eval (data/HumanEval.jsonl.gz)",
    ),
    Entry(
        name="gsm8k",
        about="GSM8K, 1,319 grade school sums in words",
        files=("gsm8k_test.jsonl",),
        parse=parse_gsm8k,
        hub=(
            HubFile("DaertML/gsm8k-jsonl", "test.jsonl", "main", "GSM8K's test part, 1,319 questions"),
            HubFile(
                "RedHatAI/speculator_benchmarks",
                "math_reasoning.jsonl",
                "main",
                "the mathematical reasoning part of a speculation benchmark, 80 questions taken from GSM8K",
            ),
        ),
        original="https://github.com/openai/grade-school-math (grade_school_math/data/test.jsonl)",
    ),
    Entry(
        name="mmlu-pro",
        about="MMLU-Pro, multiple choice in 14 subjects",
        files=("mmlu_pro_test.parquet", "mmlu_pro_test.jsonl", "mmlu_pro.jsonl", "mmlu_pro_140.jsonl"),
        parse=parse_mmlu_pro,
        hub=(
            HubFile(
                "TIGER-Lab/MMLU-Pro",
                "data/test-00000-of-00001.parquet",
                "main",
                "MMLU-Pro's test part, 12,032 questions",
            ),
        ),
        original="https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro (data/test-00000-of-00001.parquet)",
        answer_tokens=1024,
    ),
    Entry(
        name="alpaca",
        about="252 user-written instructions of self-instruct, which stand in for Alpaca's",
        files=("self_instruct_user_oriented_252.jsonl", "user_oriented_instructions.jsonl"),
        parse=parse_instructions,
        hub=(
            HubFile(
                "HuggingFaceH4/self-instruct-eval",
                "human-eval.jsonl",
                "main",
                "self-instruct's 252 user-oriented instructions",
            ),
        ),
        original="https://github.com/yizhongw/self-instruct (human_eval/user_oriented_instructions.jsonl)",
        unscored="these instructions are open, and their answers are judged by people",
    ),
    Entry(
        name="cnndm",
        about="CNN/DailyMail, 80 articles to summarise",
        files=("eagle_sum_question.jsonl", "cnndm.jsonl"),
        parse=parse_articles,
        hub=(
            HubFile(
                "RedHatAI/speculator_benchmarks",
                "summarization.jsonl",
                "main",
                "80 articles of CNN/DailyMail as in the usual speculation benchmarks",
            ),
        ),
        original="https://github.com/SafeAILab/EAGLE (eagle/data/sum/question.jsonl)",
        answer_tokens=256,
    ),
    Entry(
        name="qa",
        about="Natural Questions, 80 short questions",
        files=("eagle_qa_question.jsonl", "qa.jsonl"),
        parse=parse_questions,
        hub=(
            HubFile(
                "RedHatAI/speculator_benchmarks",
                "qa.jsonl",
                "main",
                "80 questions of Natural Questions as in the usual speculation benchmarks",
            ),
        ),
        original="https://github.com/SafeAILab/EAGLE (eagle/data/qa/question.jsonl)",
        unscored="this file has questions without answers",
        answer_tokens=256,
    ),
)

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def dataset_names() -> tuple[str, ...]:
    """The names that `--dataset` takes, in the order of the catalog."""
    return tuple(CATALOG)
