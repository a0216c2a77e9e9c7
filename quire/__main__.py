"""`python -m quire` is `quire`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from server.cli import main

    sys.exit(main())
