"""The goals of the GPU benchmark: their values from results, and the table."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Goal:
    """One line of the table; `value` is None where a row that it needs was not
    measured, and `why` names the row.
    """

    what: str
    case: str
    unit: str
    goal: float
    stretch: float
    value: float | None
    why: str = ""

    @property
    def met(self) -> str:
        if self.value is None:
            return f"not measured: {self.why}"
        return (
            "stretch"
            if self.value >= self.stretch
            else "met"
            if self.value >= self.goal
            else "MISSED"
        )


class Missing(Exception):
    """The results lack a row that a goal needs."""


class Results:
    """Rows of cases, by name: `{case: {"rows": {candidate: row}, "errors": {candidate:
    reason}}}`.
    """

    def __init__(self, cases: dict, dry_run: bool):
        self._cases, self._dry_run = cases, dry_run

    def best(self, case: str, prefix: str, key: str = "us", fp8: bool = False) -> float:
        """Return the best figure of the candidates whose names begin with `prefix`.

        With `fp8` only candidates that multiplied in FP8 count.
        """
        rows = self._cases.get(case, {}).get("rows", {})
        named = [
            row for name, row in rows.items() if name.startswith(prefix) and key in row
        ]
        if not named:
            raise Missing(f"{case}: {prefix}")
        real = [
            row
            for row in named
            if not fp8
            or self._dry_run
            or any(k.startswith("fp8") for k in row["gemms"])
        ]
        if not real:
            raise Missing(f"{case}: {prefix} ran no FP8 GEMM, so it is no peer")
        values = [row[key] for row in real]
        return min(values) if key == "us" else max(values)

    def worst(self, case: str, prefix: str, key: str) -> float:
        """Return the lowest rate of the rows whose names begin with `prefix`, which
        holds at every shape.
        """
        rows = self._cases.get(case, {}).get("rows", {})
        values = [
            row[key]
            for name, row in rows.items()
            if name.startswith(prefix) and key in row
        ]
        if not values:
            raise Missing(f"{case}: {prefix}")
        return min(values)

    def faster(self, case: str, ours: str, peer: str, fp8: bool = False) -> float:
        return self.best(case, peer, fp8=fp8) / self.best(case, ours)


# Goal and stretch goal of these ops, in % of the rate of a copy of as many bytes.
OF_COPY = {"quantize": (88, 92), "quantize_transpose": (80, 88)}
FAST_GEMM = (1300, 1400)  # TFLOP/s


def kernel_goal(kernel: str) -> str:
    """Return the goal of one line of the case `kernels`, for a table; "" for a kernel
    without a goal.
    """
    op, *variant = kernel.split()
    if kernel == "scaled_matmul fast":
        return f"{FAST_GEMM[0]} TFLOP/s"
    return f"{OF_COPY[op][0]} %" if op in OF_COPY and "sums" not in variant else ""


def goals(cases: dict, dry_run: bool) -> list[Goal]:
    results = Results(cases, dry_run)

    def of(what, case, unit, goal, stretch, value):
        try:
            return Goal(what, case, unit, goal, stretch, value())
        except Missing as missing:
            return Goal(what, case, unit, goal, stretch, None, str(missing))

    def faster(what, goal, stretch, case, *names, **options):
        return of(
            what,
            case,
            "x",
            goal,
            stretch,
            lambda: results.faster(case, *names, **options),
        )

    bf16, flax, own, drop_in = "bf16", "flax", "jaxfp8 own", "jaxfp8 drop-in"
    quantized = [
        (op, dtype, limits)
        for op, limits in OF_COPY.items()
        for dtype in ("bf16", "f32")
    ]
    # These hold at both shapes; the comma ends the kernel's name.
    table = [
        of(
            f"kernel {op} {dtype}",
            "kernels",
            "%",
            *limits,
            lambda k=f"{op} {dtype},": results.worst("kernels", k, "of_copy"),
        )
        for op, dtype, limits in quantized
    ]
    table += [
        of(
            "kernel of GEMM fast",
            "kernels",
            "TFLOP/s",
            *FAST_GEMM,
            lambda: results.best("kernels", "scaled_matmul fast,", "tflops"),
        ),
        faster(
            "GEMM fast, to torch._scaled_mm",
            1.0,
            1.0,
            "gemm",
            "jaxfp8 fast",
            "torch._scaled_mm fast",
        ),
        faster("GEMM fast, to bf16", 1.65, 1.7, "gemm", "jaxfp8 fast", bf16),
        of(
            "GEMM fast",
            "gemm",
            "TFLOP/s",
            *FAST_GEMM,
            lambda: results.best("gemm", "jaxfp8 fast", "tflops"),
        ),
    ]
    table += [
        faster("Dense, own, to bf16", 1.5, 1.65, "dense", own, bf16),
        faster("Dense, own, to Flax", 1.12, 1.2, "dense", own, flax, fp8=True),
        faster("Dense, drop-in, to bf16", 1.4, 1.55, "dense", drop_in, bf16),
        faster(
            "Dense, own, to torch float8 linear",
            1.0,
            1.1,
            "torch_linear",
            own,
            "torch float8",
        ),
        faster("small Dense, own, to bf16", 0.85, 1.0, "small_dense", own, bf16),
        faster(
            "small Dense, own, to Flax", 2.2, 2.6, "small_dense", own, flax, fp8=True
        ),
        faster("gated MLP, own, to bf16", 1.4, 1.55, "gated_mlp", own, bf16),
        faster("Llama, own, to bf16", 1.35, 1.5, "model", own, bf16),
        faster("Llama, quantize, to bf16", 1.3, 1.4, "model", "jaxfp8 quantize", bf16),
        faster("Llama, own, to Flax", 1.05, 1.15, "model", own, flax, fp8=True),
    ]
    return table


def table(lines: list[Goal], dry_run: bool) -> str:
    head = (
        f"{'':40} {'value':>9} {'goal':>7} {'stretch':>7}  "
        f"{'dry run, no GPU times' if dry_run else ''}"
    ).rstrip()
    rows = [head]
    for line in lines:
        value = (
            "-"
            if line.value is None
            else f"{line.value:.2f}"
            if line.unit == "x"
            else f"{line.value:.0f}"
        )
        limits = [
            f"{x:.2f}" if line.unit == "x" else f"{x:.0f}"
            for x in (line.goal, line.stretch)
        ]
        met = "dry run" if dry_run and line.value is not None else line.met
        rows.append(
            f"{line.what:40} {value:>9} {limits[0]:>7} {limits[1]:>7} {line.unit:7} "
            f"{met}"
        )
    return "\n".join(rows)
