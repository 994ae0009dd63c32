"""The notes about versions of torch when names were rewritten."""

import re
from collections.abc import Iterable

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree.amp_names import FIRST_TORCH
from amp_lab.migrate.tree.rewriter import Finding

_FOR_OLDER_AUTOCAST = remedy(
    "migrate.for_older_autocast",
    "only autocast is rewritten, and the code must also support torch 1.10 or 1.11",
    "to support torch 1.10 and 1.11 too, write torch.autocast for torch.amp.autocast",
)
_FOR_BOTH = {  # by a pattern of the names that each is about
    "GradScaler": remedy(
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
    "custom_(?:fwd|bwd)": remedy(
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


def notes_on_versions(findings: Iterable[Finding]) -> list[str]:
    """The oldest torch with all names of the rewritten code, and how to support older versions.

    Empty if nothing was rewritten to ``torch.amp``.
    """
    messages = [finding.message for finding in findings if finding.kind == "rewritten"]
    text = "\n".join(messages)  # lines such as: torch.cuda.amp.autocast is torch.amp.autocast for …
    needed = [version for name, version in FIRST_TORCH.items() if f"is torch.amp.{name} " in text]
    if not needed:
        return []
    major, minor = max(needed)
    notes = [f"what is rewritten needs torch {major}.{minor} or later"]
    for names, for_both in _FOR_BOTH.items():
        if re.search(rf"torch\.cuda\.amp\.{names} is", text):
            notes.append(for_both.text)
    if len(notes) == 1 and "is torch.amp.autocast " in text:
        notes.append(_FOR_OLDER_AUTOCAST.text)
    return notes
