"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_bits": [
        ("mebibytes = 8", "This counts only the four bits of each value"),
        ("mebibytes = 72", "A byte has eight bits, and a MiB has 2^20 bytes"),
        ("mebibytes = 72 * 2**20", "A byte has eight bits, and a MiB has 2^20 bytes"),
        ("mebibytes = 12", "Count four bits for each value, and a sixteenth of eight bits"),
    ],
    "check_scale_of": [
        (
            "def factor_of(values):\n    return 448 / values.max()",
            "values with a negative number of the largest magnitude",
        ),
        ("def factor_of(values):\n    return 448 / values.abs().max()", "Zero times this is NaN"),
        (
            "def factor_of(values):\n    return values.abs().max() / 448",
            "the largest magnitude becomes",
        ),
    ],
    "check_block_scales": [
        (
            "def block_scales(rows):\n"
            "    return (rows.abs().amax(1, keepdim=True) / 6).log2().floor().exp2()",
            "but values above 6 are clipped",
        ),
        (
            "def block_scales(rows):\n    return rows.abs().amax(1, keepdim=True) / 6",
            "Some scales are not powers of two, but E8M0 can represent only",
        ),
        (
            "def block_scales(rows):\n    return (rows.abs().amax(1) / 6).log2().ceil().exp2()",
            "one scale for each row",
        ),
        (
            "def block_scales(rows):\n"
            "    return rows.abs().amax(1, keepdim=True).log2().ceil().exp2()",
            "Divided by its scale, a row reaches only",
        ),
    ],
    "check_left_out": [
        (
            "def left_out(report, form):\n"
            "    return [r.layer.name for r in report.layers if r.left_out]",
            "This layer is converted, or the name is not a layer name",
        ),
        (
            "def left_out(report, form):\n"
            "    found = [r for r in report.layers if r.format == form and r.left_out]\n"
            "    return [r.layer.name for r in found[:1]]",
            "your list does not contain",
        ),
    ],
}
