"""For each check: wrong answers in place of the stub, and words of the line that each gets."""

WRONG_ANSWERS = {
    "check_dtypes": [
        ('dtypes = ["bf16", "fp32", "fp32", "fp32", "fp32"]', "`relu` is not on the list"),
        (
            'dtypes = ["bf16", "bf16", "fp32", "fp32", "fp32"]',
            "after the block, autocast no longer casts, and `e` already exists",
        ),
        ('dtypes = ["bf16", "bf16"]', "a list of five strings"),
    ],
    "check_island": [
        (
            """
def square_in_fp32(matrix):
    with torch.autocast("cpu", enabled=False):
        return matrix @ matrix
""",
            "`enabled=False` turns casting off, but does not change the dtype of the inputs",
        ),
        (
            "def square_in_fp32(matrix):\n    return matrix.float() @ matrix.float()",
            "autocast has cast the matrix to bf16 again",
        ),
        (
            "def square_in_fp32(matrix):\n    return (matrix @ matrix).float()",
            "the cast comes too late",
        ),
    ],
    "check_casts": [
        ("number_of_casts = 6", "without a cache"),
        ("number_of_casts = 2", "2 would be right if the cache stored both casts"),
        ("number_of_casts = 3", "Count the casts of `x` and the casts of `w` separately"),
    ],
    "check_policy": [
        (
            """
def policy(op):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtype = op(torch.rand(4, 4)).dtype
    return "fp32" if dtype is torch.float32 else "lower precision"
""",
            "You need both calls to tell the three policies apart",
        ),
        (
            "def policy(op):\n    return op(torch.rand(4, 4)).dtype",
            "which is not one of the three policies",
        ),
    ],
}
