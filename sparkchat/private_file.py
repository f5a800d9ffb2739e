"""Replaces a file of ours so that no reader, and no process that is killed, ever finds or leaves half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_private(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by a whole new file that its owner alone may read (0600).

    Raises OSError, and then ``path`` is as it was.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        # Gone already where it took its place.
        Path(temporary).unlink(missing_ok=True)
