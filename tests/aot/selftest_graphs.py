"""The programs in which the selftest launches each op first, compiled for an H200;
prints whether it is in a graph.
"""

from jaxfp8.inspect import _machine
from jaxfp8.selftest import _checks

from . import programs


def main() -> None:
    def recorded(op):
        function, arguments = _machine.OPS[op]
        return _checks.record(function, programs.on_one(arguments))

    for op in _machine.OPS:
        print(op, recorded(op)[1])
    _checks._GRAPHS["xla_gpu_enable_command_buffer"] = ""
    print("without", recorded("amax")[1])


if __name__ == "__main__":
    main()
