"""Inference in a process of its own: scheduler, model, memory, restoration."""
