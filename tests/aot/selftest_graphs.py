"""The programs in which the selftest launches each op first, compiled for an H200;
prints whether it is in a graph.
"""

from jaxfp8.inspect import _op_calls
from jaxfp8.selftest import _checks

from . import programs


def main() -> None:
    def recorded(op):
        function, arguments, *_ = _op_calls.call(op, _op_calls.Kind.square(op, 256))
        return _checks.record(function, programs.on_one(arguments))

    for op in _op_calls.OPS:
        print(op, recorded(op)[1])
    _checks._GRAPHS["xla_gpu_enable_command_buffer"] = ""
    print("without", recorded("amax")[1])


if __name__ == "__main__":
    main()
