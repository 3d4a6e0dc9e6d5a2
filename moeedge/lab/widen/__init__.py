"""Widening: a GGUF file of any larger shape that computes the same function as a small one.

shape.py     the shape of a model, the shapes of known ones, and which wider shape keeps the function
maps.py      which element of the source each element of a wide dimension comes from
layout.py    every tensor and metadata key of the wide file, before anything is written
blocks.py    rows of quantised blocks, copied byte by byte or quantised again
writer.py    streams the layout to disk
"""
