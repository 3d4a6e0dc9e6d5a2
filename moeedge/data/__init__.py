"""Prompt sets: where they are looked up, how their files are read, and moeedge's own small sample."""

from __future__ import annotations

from moeedge.data.datasets import CATALOG, dataset_names, load_dataset, load_sample, load_toy
from moeedge.data.prompts import Dataset, Message, Prompt

__all__ = ["CATALOG", "Dataset", "Message", "Prompt", "dataset_names", "load_dataset", "load_sample", "load_toy"]
