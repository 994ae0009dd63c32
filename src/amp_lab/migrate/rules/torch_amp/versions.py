"""The notes about versions of torch when names were rewritten."""

import re
from collections.abc import Iterable

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree.amp_names import FIRST_TORCH
from amp_lab.migrate.tree.rewriter import Finding

# https://docs.pytorch.org/docs/2.1/amp.html: torch.autocast is new in 1.10.
_FOR_OLDER_AUTOCAST = remedy(
    "migrate.for_older_autocast",
    "only autocast is rewritten, and the code must also support torch 1.10 or 1.11",
    "to support torch 1.10 and 1.11 too, write torch.autocast instead of torch.amp.autocast",
)
_FOR_BOTH = {  # by the names that each is about
    ("GradScaler",): remedy(
        "migrate.for_both.scaler",
        "GradScaler is rewritten, and the code must also support an older torch",
        """\
to support older versions too, keep GradScaler() without a device, and import it like this:

    try:
        from torch.amp import GradScaler
    except ImportError:
        from torch.cuda.amp import GradScaler
""",
    ),
    ("custom_fwd", "custom_bwd"): remedy(
        "migrate.for_both.custom",
        "custom_fwd or custom_bwd is rewritten, and the code must also support an older torch",
        """\
to support older versions too, keep the old @custom_fwd and @custom_bwd, and import them like this:

    import functools

    try:
        from torch.amp import custom_bwd, custom_fwd
    except ImportError:
        from torch.cuda.amp import custom_bwd, custom_fwd
    else:
        custom_bwd = functools.partial(custom_bwd, device_type="cuda")
        custom_fwd = functools.partial(custom_fwd, device_type="cuda")
""",
    ),
}
# A message such as: torch.cuda.amp.autocast is torch.amp.autocast for 'cuda'
_REWRITTEN_NAME = re.compile(r"torch\.(cuda|cpu)\.amp\.(\w+) is torch\.amp\.")


def notes_on_versions(findings: Iterable[Finding]) -> list[str]:
    """The oldest torch with all new names of torch.amp, and how to support older versions.

    Empty if nothing was rewritten to ``torch.amp``.
    """
    messages = [finding.message for finding in findings if finding.kind == "rewritten"]
    uses = _REWRITTEN_NAME.findall("\n".join(messages))  # pairs such as ("cuda", "autocast")
    rewritten = {name for _, name in uses}
    if not rewritten:
        return []
    major, minor = max(FIRST_TORCH[name] for name in rewritten)
    notes = [f"the new names of torch.amp need torch {major}.{minor} or later"]
    # Older versions have the scaler and the decorators only in torch.cuda.amp. torch.cpu.amp got
    # its GradScaler in torch 2.3, together with torch.amp, and never had the decorators.
    from_cuda = {name for device, name in uses if device == "cuda"}
    for names, for_both in _FOR_BOTH.items():
        if from_cuda.intersection(names):
            notes.append(for_both.text)
    if rewritten == {"autocast"}:
        notes.append(_FOR_OLDER_AUTOCAST.text)
    return notes
