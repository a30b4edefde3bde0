"""Stateless compute functions, each with an fp32 reference beside the fast path."""
