"""List every remedy that a tool can print, with the test that does what it says.

    python tools/list_remedies.py

Exit code 1 if a remedy has no test.
"""

import importlib
import sys
from pathlib import Path

from amp_lab.core.remedies import REMEDIES, Remedy

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "amp_lab.core.cpu",
    "amp_lab.advisor.learning",
    "amp_lab.advisor.session",
    "amp_lab.cli.user_code",
    "amp_lab.difference",
    "amp_lab.formats.rehearsal",
    "amp_lab.migrate",
    "amp_lab.numerics.nonfinite_remedies",
    "amp_lab.numerics.scale_log",
    "amp_lab.numerics.underflow",
    "amp_lab.recipes.loss",
    "amp_lab.tracing.answered",
    "amp_lab.tracing.cast_advice",
    "amp_lab.tracing.fake_device",
    "amp_lab.tracing.kernel_limits",
    "amp_lab.tracing.memory",
    "amp_lab.tracing.memory_advice",
    "amp_lab.tracing.operands",
    "amp_lab.tracing.precision_advice",
    "amp_lab.tracing.sharding_result",
    "amp_lab.tracing.size_advice",
    "amp_lab.tracing.xray",
)
"""The modules that define remedies."""


def all_remedies() -> dict[str, Remedy]:
    """The remedies of all tools, by code."""
    for module in MODULES:
        importlib.import_module(module)
    return REMEDIES


def main() -> int:
    """Print the list; return 0, or 1 if one has no test."""
    for folder in ("notebooks", "tools", "tests/support", "tests/remedies"):
        sys.path.append(str(ROOT / folder))
    tests = importlib.import_module("remedy_tests").remedies_tested()  # names of tests, by code
    without_test = []
    for code, remedy in sorted(all_remedies().items()):
        print(f"{code}: {remedy.when}\n    {remedy.text}")
        for test in tests.get(code, []):
            print(f"    {test}")
        if code not in tests:
            without_test.append(code)
    names = f": {', '.join(without_test)}" if without_test else ""
    print(f"{len(REMEDIES)} remedies, {len(without_test)} without a test{names}")
    return 1 if without_test else 0


if __name__ == "__main__":
    sys.exit(main())
