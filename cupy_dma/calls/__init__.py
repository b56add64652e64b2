"""Arguments that have passed every check, and the one way to a backend."""
