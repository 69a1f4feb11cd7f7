"""Replace files as a whole."""

import contextlib
import os
import shutil
import tempfile


@contextlib.contextmanager
def replaced(path, mode):
    """Open a file for writing that takes the place of `path` when the context ends
    without an error.

    What stood at `path` stays whole until then: after an error, for readers that have
    it open, and where it is mapped into memory. The new file is on the disk before it
    takes the place. What is no regular file, as a pipe, is written as it is.

    Args:
        path: the file; a link to it stays a link.
        mode: `"w"` or `"wb"`.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, mode) as file:
            yield file
        return
    # A folder beside the file is on the same disk. The file in it gets the permissions
    # that any new file gets.
    with tempfile.TemporaryDirectory(
        prefix=".jaxfp8-", dir=os.path.dirname(path)
    ) as folder:
        temporary = os.path.join(folder, os.path.basename(path))
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
