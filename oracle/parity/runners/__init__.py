"""Runners: each runs a program on a checkpoint and records a trace."""
