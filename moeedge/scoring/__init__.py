"""Scores answers: references, exact scorers, and a sandbox for programs."""
