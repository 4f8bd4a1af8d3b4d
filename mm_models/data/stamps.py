"""What an image file looked like when it was examined, to see later whether it has changed."""

from __future__ import annotations

import os
from pathlib import Path

Stamp = tuple[int, int]
"""(bytes, time of the last change in nanoseconds)."""
MISSING: Stamp = (-1, -1)


def stamp(path: Path) -> Stamp:
    """The file as it is now."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: no name a file can have
        return MISSING
    return found.st_size, found.st_mtime_ns
