"""Rewrites old mixed-precision code to today's torch.amp, and finds mistakes in it.

It is behind the command ``amp-lab migrate``.

    from amp_lab.migrate import migrate_paths, migrate_source

    new, findings = migrate_source(old)

A rule is a module in ``rules/``. This is a whole one, for
``torch.backends.cuda.matmul.allow_tf32``:

    PART = "torch"  # `--select torch` runs it; or "apex", or "mistakes"
    TRIGGERS = ("allow_tf32",)  # a file is read only if it has one of these texts; several words
                                # in one text, with blanks between, must all be in the file

    def run(file):
        for use in file.tree.uses:
            if "torch.backends.cuda.matmul.allow_tf32" in use.origins:
                file.say(use.node, "by hand", "use torch.set_float32_matmul_precision")

`Rewriter`, which is the `file` here, has `replace` and `insert` for edits, and `code` for the steps
of training. `Tree` has the names of the file and their origins. The examples of a rule, old code
and new, go to ``tests/migrate/snippets``.
"""

from amp_lab.core.requirements import needed_for

with needed_for("migrate"):
    from amp_lab.migrate.files import Result, migrate_paths
    from amp_lab.migrate.reports import format_github
    from amp_lab.migrate.rules import SELECTIONS, Wanted, migrate_source
    from amp_lab.migrate.rules.torch_amp.versions import notes_on_versions
    from amp_lab.migrate.tree.rewriter import Finding

__all__ = ["SELECTIONS", "Finding", "Result", "Wanted", "format_github"]
__all__ += ["migrate_paths", "migrate_source", "notes_on_versions"]
