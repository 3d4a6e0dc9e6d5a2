"""Widening: a GGUF file of any larger shape that computes the same function as a small one.

shape.py     the shape of a model, the shapes of known ones, and which wider shape keeps the function
maps.py      which element of the source each element of a wide dimension comes from, and rows moved by that
layout.py    every tensor and metadata key of the wide file, before anything is written
writer.py    streams the layout to disk
"""
