"""Checkpoint facts from headers alone."""
