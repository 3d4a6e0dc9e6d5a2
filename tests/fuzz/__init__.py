"""Damaged inputs of every kind: `python -m tests.fuzz KIND --n N --seed S`."""
