"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_dtypes": [
        ('dtypes = ["bf16", "fp32", "fp32", "fp32", "fp32"]', "`relu` is not on the list"),
        ('dtypes = ["bf16", "bf16", "fp32", "fp32", "fp32"]', "changes no tensor that exists"),
        ('dtypes = ["bf16", "bf16"]', "a list of five strings"),
    ],
    "check_island": [
        (
            """
def square_in_fp32(matrix):
    with torch.autocast("cpu", enabled=False):
        return matrix @ matrix
""",
            "changes no dtype that comes in",
        ),
        (
            "def square_in_fp32(matrix):\n    return matrix.float() @ matrix.float()",
            "cast the matrix down again",
        ),
        (
            "def square_in_fp32(matrix):\n    return (matrix @ matrix).float()",
            "the cast comes too late",
        ),
    ],
    "check_casts": [
        ("number_of_casts = 6", "without a cache"),
        ("number_of_casts = 2", "if the cache kept both"),
        ("number_of_casts = 3", "by themselves"),
    ],
    "check_policy": [
        (
            """
def policy(op):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtype = op(torch.rand(4, 4)).dtype
    return "fp32" if dtype is torch.float32 else "lower precision"
""",
            "no single call",
        ),
        ("def policy(op):\n    return op(torch.rand(4, 4)).dtype", "none of the three"),
    ],
}
