"""Find backward functions of autograd.Function that restore autocast without its dtype."""

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.amp_names import AUTOCASTS, OLD_NAMES
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
_RESTORED_WITHOUT_DTYPE = remedy(
    "migrate.restored_without_dtype",
    "the backward of an autograd.Function restores autocast without the dtype of forward",
    "this restores whether autocast was on, but not the dtype, so the block runs in the default "
    "dtype: in forward also save torch.get_autocast_dtype(device_type), and pass it as dtype=",
    failure="AMP0020",
)
_FUNCTIONS = {"torch.autograd.Function", "torch.autograd.function.Function"}


def run(file: Rewriter) -> None:
    """Note where a backward restores autocast without its dtype."""
    file.report("note", restored_without_dtype(file.code))


def restored_without_dtype(code: CodeReader) -> Mistakes:
    """Yield each autocast in a backward with ``enabled=ctx.…`` and without a dtype.

    A recomputed block then runs in float16 on a GPU and in bfloat16 on a CPU, whatever its dtype in
    forward was. The old names are left out, because each has a fixed default dtype, and so are
    calls with ``*args``.
    """
    for call, scope in code.tree.calls.items():
        origin = code.origin(call.func, scope)
        if origin not in AUTOCASTS or origin in OLD_NAMES:
            continue
        if any(arg.star for arg in call.args):
            continue
        arguments = code.arguments(call)
        enabled = nodes.name_parts(arguments.get("enabled"))
        if enabled is None or "dtype" in arguments:
            continue
        context = _context_around(code, call)
        if context is not None and enabled[0] == context:  # ctx of ctx.was_enabled
            yield call, _RESTORED_WITHOUT_DTYPE.text


def _context_around(code: CodeReader, call: cst.Call) -> str | None:
    """The name of the context, such as ``ctx``, in the backward around a call.

    None unless the innermost function around the call is a backward of an ``autograd.Function``.
    """
    function = code.tree.around(call, cst.FunctionDef)
    class_ = code.tree.around(call, cst.ClassDef)
    if function is None or class_ is None or function.name.value != "backward":
        return None
    parameters = function.params.params
    if not parameters or _FUNCTIONS.isdisjoint(code.base_origins(class_)):
        return None
    return parameters[0].name.value
