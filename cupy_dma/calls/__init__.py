"""Checked arguments, and the only path to a backend."""
