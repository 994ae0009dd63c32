"""Where in the user's code an error was raised."""

import pytest

from amp_lab.tracing.operands import user_line


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("model.py", "model.py:2"),
        ("<string>", ""),
        ("<eval_with_key>.0 from <stdin>:6 in forward", ""),  # as torch.fx names its code
        ("<frozen importlib._bootstrap>", ""),
    ],
)
def test_code_without_a_file_is_not_the_users(file, expected):
    names = {}
    exec(compile("def fail():\n    return 1 // 0\n", file, "exec"), names)
    with pytest.raises(ZeroDivisionError) as raised:
        names["fail"]()
    error = raised.value
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own line
    assert user_line(error) == expected
