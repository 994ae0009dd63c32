"""Settings for the whole test run, and the count of notebook cells that ran."""

import contextlib
import gc
import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator

import nbformat
import pytest

import build_pairs
from amp_lab.core.cpu import check_limits
from amp_lab.core.errors import DeviceError

# What the committed outputs were made with.
SETTINGS = {"AMP_LAB_DEVICE": "cpu", "AMP_LAB_SCALE": "quick"}

# Read once, when a process imports Keras, whichever test does it first.
os.environ["KERAS_BACKEND"] = "torch"

REVERSED = "AMP_LAB_REVERSED"  # set by tools/cpu_matrix.py: the last file first
WEEKLY = os.environ.get("AMP_LAB_WEEKLY") == "1"  # with every case, and not one of each kind

needs_keras = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("keras", "tensorflow"))),
    reason="Keras or TensorFlow is not installed",
)


class SkipCount:
    """Says at the end of a run in a line what this machine could not check, by reason."""

    def __init__(self):
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            parts = [f"{count} ({reason})" for reason, count in self.skipped.most_common()]
            terminalreporter.write_line(f"not checked on this machine: {'; '.join(parts)}")


class CellCount:
    """Fails a run of everything in which not every cell of every notebook ran.

    A plugin of its own, because pytest calls the hooks of a conftest.py only for tests below it.
    """

    def __init__(self):
        self.passed: set[str] = set()
        self.problem = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if ".ipynb::" in report.nodeid and report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        everything = (
            config.args_source is pytest.Config.ArgsSource.TESTPATHS
            and not hasattr(config, "workerinput")  # a part of a run in parallel
            and not (config.option.keyword or config.option.markexpr or config.option.collectonly)
        )
        if everything and session.exitstatus == pytest.ExitCode.OK:
            missing = cells_not_run(self.passed)
            if missing:
                self.problem = f"cells of notebooks that did not run: {missing}"
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.problem:
            terminalreporter.write_line(self.problem, red=True)


def cells_not_run(passed: Iterable[str]) -> dict[str, int]:
    """How many code cells of each notebook are not among these node ids, where any are not."""
    ran = Counter(nodeid.partition("::")[0].rpartition("/")[2] for nodeid in passed)
    missing = {}
    for source in build_pairs.find():
        pair = source.with_suffix(".ipynb")
        cells = nbformat.read(pair, as_version=4).cells
        count = sum(cell.cell_type == "code" for cell in cells) - ran[pair.name]
        if count:
            missing[pair.name] = count
    return missing


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(100_000, 20, 100)  # so many objects live on that looking for them takes long
    try:
        check_limits()
    except DeviceError as error:
        pytest.exit(str(error), returncode=2)
    for name, value in SETTINGS.items():
        asked = os.environ.setdefault(name, value) or value
        if asked != value:
            message = f"{name}={asked!r}: the tests run with {name}={value}; unset it"
            pytest.exit(message, returncode=2)
    # Commands would print for a terminal of the width COLUMNS. GNU readline sets it for all
    # processes that a test starts, so readline comes first.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    os.environ.pop("COLUMNS", None)
    os.unsetenv("COLUMNS")  # what readline set is not in os.environ
    if hasattr(config, "workerinput"):  # workers share the cores
        share = max(1, (os.cpu_count() or 1) // config.workerinput["workercount"])
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    # A machine on which tests run side by side is busy, so that a comparison would use all its time
    # and not be trusted in the end. It shows as much in half a second.
    os.environ.setdefault("AMP_LAB_TIMING_S", "0.5")
    config.pluginmanager.register(CellCount(), "cell-count")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipCount(), "skip-count")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(REVERSED) == "1":  # file by file: a test may need those above it in its file
        items.sort(key=lambda item: str(item.path), reverse=True)
    weekly = [item for item in items if item.get_closest_marker("weekly")]
    if weekly and not WEEKLY:
        config.hook.pytest_deselected(items=weekly)
        items[:] = [item for item in items if item not in set(weekly)]


@pytest.fixture
def one_thread_and_seed() -> Iterator[None]:
    """The same random numbers and sums in each test, and no figure left open after it."""
    import matplotlib.pyplot as plt
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    plt.close("all")


@pytest.fixture
def each_warning():
    """Let torch repeat the warnings that it gives once in a process."""
    import torch

    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)
