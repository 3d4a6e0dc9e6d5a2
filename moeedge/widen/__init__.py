"""Widening: a GGUF file of any larger shape that computes what a small one computes.

shape.py     the shape of a model, the shapes of known ones, what can become what
maps.py      which element of the source each element of a wide dimension comes from
plan.py      every tensor and every metadata key of the wide file, before anything is written
blocks.py    rows of quantised blocks, copied byte by byte or quantised anew
writer.py    the plan, streamed to disk
"""
