"""Find questions about autocast that name no device."""

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree.code_reader import CodeReader, Mistakes
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = ("is_autocast_enabled",)
_WITHOUT_DEVICE = remedy(
    "migrate.asked_without_device",
    "torch.is_autocast_enabled() is called without a device",
    "the result can be False in an autocast block, for example on the CPU: "
    "call torch.is_autocast_enabled(device_type)",
    failure="AMP0288",
)


def run(file: Rewriter) -> None:
    """Note each question whether autocast is on that names no device."""
    file.report("note", _asked_without_device(file.code))


def _asked_without_device(code: CodeReader) -> Mistakes:
    """Yield each call of ``torch.is_autocast_enabled()`` without an argument."""
    for call, scope in code.tree.calls.items():
        if not call.args and code.origin(call.func, scope) == "torch.is_autocast_enabled":
            yield call, _WITHOUT_DEVICE.text
