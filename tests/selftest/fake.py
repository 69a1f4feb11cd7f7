"""A process that does what the name of its check says, in place of a worker."""

import ctypes
import os
import signal
import sys
import time


def begin(name, connection):
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":  # where Python's own handlers of signals never run
        ctypes.PyDLL(None).sleep(600)
    if name == "exit":
        sys.exit(3)
    if name == "silence":
        os._exit(0)
    connection.send({"check": name, "status": "passed", "detail": ""})
    if name == "crash at exit":
        os.kill(os.getpid(), signal.SIGABRT)
    if name == "hang at exit":
        connection.close()
        time.sleep(600)
