"""Prompt sets: where they are looked up, how their files are read, and moeedge's own small sample."""

from __future__ import annotations

from moeedge.data.datasets import (
    CATALOG,
    dataset_names,
    load_calibration,
    load_dataset,
    load_datasets,
    load_sample,
    load_toy,
)
from moeedge.data.prompts import Dataset, Prompt, PromptMessage
from moeedge.data.texts import EvaluationText, load_calibration_text, load_text

__all__ = [
    "CATALOG",
    "Dataset",
    "EvaluationText",
    "Prompt",
    "PromptMessage",
    "dataset_names",
    "load_calibration",
    "load_calibration_text",
    "load_dataset",
    "load_datasets",
    "load_sample",
    "load_text",
    "load_toy",
]
