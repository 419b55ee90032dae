"""``python -m fxckpt`` is the same program as ``fxckpt``."""

import sys

from fxckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
