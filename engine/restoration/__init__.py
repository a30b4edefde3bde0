"""Checkpoint (saving) and restore (loading) of a chat's state, by plan."""
