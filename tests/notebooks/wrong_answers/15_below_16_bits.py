"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_bits": [
        ("mebibytes = 8", "the four bits of each value alone"),
        ("mebibytes = 72", "right but for its unit"),
        ("mebibytes = 12", "It is not 12 MiB"),
    ],
    "check_scale_of": [
        ("def factor_of(values):\n    return 448 / values.max()", "largest is negative"),
        ("def factor_of(values):\n    return 448 / values.abs().max()", "zero times that is NaN"),
        ("def factor_of(values):\n    return values.abs().max() / 448", "and not 448"),
    ],
    "check_block_scales": [
        (
            "def block_scales(rows):\n"
            "    return (rows.abs().amax(1, keepdim=True) / 6).log2().floor().exp2()",
            "round the power of two up",
        ),
        (
            "def block_scales(rows):\n    return rows.abs().amax(1, keepdim=True) / 6",
            "no powers of two",
        ),
        (
            "def block_scales(rows):\n    return (rows.abs().amax(1) / 6).log2().ceil().exp2()",
            "one scale for each row",
        ),
        (
            "def block_scales(rows):\n"
            "    return rows.abs().amax(1, keepdim=True).log2().ceil().exp2()",
            "half the scale is enough",
        ),
    ],
    "check_left_out": [
        (
            "def left_out(report, form):\n"
            "    return [r.layer.name for r in report.layers if r.left_out]",
            "which is converted",
        ),
        (
            "def left_out(report, form):\n"
            "    found = [r for r in report.layers if r.format == form and r.left_out]\n"
            "    return [r.layer.name for r in found[:1]]",
            "does not name",
        ),
    ],
}
