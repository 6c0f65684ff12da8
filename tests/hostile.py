"""Pickles that an enemy would write."""

from __future__ import annotations

import io
import os
import zipfile


class Touch:
    """Unpickled, it runs a command that makes the file ``marker``."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class Call:
    """Unpickled, it calls ``function`` with ``arguments``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def with_pickle(archive, change):
    """The bytes of a ``torch.save`` archive with its pickle changed by ``change(bytes)``."""
    result = io.BytesIO()
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return result.getvalue()
