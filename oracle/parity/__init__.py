"""Runs one program on a candidate and its oracles, and judges every tensor on the way."""
