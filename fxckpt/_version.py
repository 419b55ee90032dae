"""The version, apart from everything else so that packaging tools can read it without importing torch."""

__all__ = ["__version__"]

__version__ = "0.1.0"
