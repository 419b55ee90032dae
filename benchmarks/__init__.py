"""Measurements of fxckpt and of what else there is; ``python -m benchmarks.run --help``."""
