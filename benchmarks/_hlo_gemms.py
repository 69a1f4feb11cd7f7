"""Count the GEMMs of a compiled program by dtype, and by library or kernel."""

import re
from collections import Counter

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(?[a-z0-9]+\[[^=]*?) "
    r"(?P<op>[a-z-]+)\((?P<operands>[^)]*)\)"
)
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")


def gemms(text: str, repetitions: int = 1) -> dict[str, float]:
    """Return the GEMMs of one repetition, such as
    `{"fp8 cublaslt": 1, "bf16 triton": 2}`.

    A dot whose operands were converted from FP8 to a wider dtype is not an FP8 GEMM.
    """
    types, triton = {}, set()
    lines = text.splitlines()
    for line in lines:
        found = _INSTRUCTION.match(line)
        if found:
            types[found["name"]] = found["type"]
        if (
            found
            and found["op"] == "fusion"
            and ("__triton" in line or "__cudnn" in line)
        ):
            triton |= {
                (name, "cudnn" if "__cudnn$fusion" in line else "triton")
                for name in re.findall(r"calls=%?([\w.-]+)", line)
            }
    kernels, kernel, count = dict(triton), None, Counter()
    for line in lines:
        computation = _COMPUTATION.match(line)
        if computation:
            kernel = kernels.get(computation[1])
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        if found["op"] == "custom-call":
            kind = _of_custom_call(_TARGET.search(line), found, types)
            count.update([kind] if kind else [])
        elif found["op"] == "dot":
            count[f"{_dtype(found, types)} {kernel or 'xla'}"] += 1
    return {kind: n / repetitions for kind, n in sorted(count.items())}


def _of_custom_call(target, found, types):
    name = target[1] if target else ""
    if name.startswith("jaxfp8_") and "matmul" in name:
        return "fp8 jaxfp8"
    if "$f8" in name:
        return "fp8 cublaslt"
    if (
        re.match(r"__cublas.*(gemm|matmul)", name)
        or name.startswith("__cudnn$")
        and "matmul" in name
    ):
        return f"{_dtype(found, types)} {'cublaslt' if 'lt' in name else 'cublas'}"
    return None


def _dtype(found, types) -> str:
    """Return the dtype of the operands, "fp8" if both are FP8; the wider dtype where
    they differ.
    """
    # Operands may be written with their types in front.
    written = re.findall(
        r"([a-z0-9]+)\[[^\]]*\](?:\{[^}]*\})? %?[\w.-]+", found["operands"]
    )[:2]
    names = re.findall(r"%?([\w.-]+)(?:,|$)", found["operands"])[:2]
    dtypes = written or [
        re.match(r"\(?([a-z0-9]+)", types.get(name, "unknown"))[1] for name in names
    ]
    wider = [dtype for dtype in dtypes if not dtype.startswith("f8")]
    return wider[0] if wider else "fp8"
