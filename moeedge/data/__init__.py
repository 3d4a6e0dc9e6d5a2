"""Prompt sets: where they are looked up, how their files are read, and moeedge's own small sample."""
