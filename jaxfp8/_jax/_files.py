"""Replace files as a whole."""

import contextlib
import os
import shutil


@contextlib.contextmanager
def replaced(path, mode):
    """Open a file for writing that takes the place of `path` when the context ends
    without an error.

    What stood at `path` stays whole until then: after an error, for readers that have
    it open, and where it is mapped into memory. The new file is on the disk before it
    takes the place.

    Args:
        path: the file; a link to it stays a link.
        mode: `"w"` or `"wb"`.
    """
    path = os.path.realpath(path)
    # A file beside the old one is on the same disk, with the permissions that any new
    # file gets.
    temporary = f"{path}.{os.getpid()}.part"
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
