"""Rewrite old mixed-precision code to today's torch.amp, and find mistakes in it.

The command ``amp-lab migrate`` uses this folder. In Python:

    from amp_lab.migrate import migrate_paths, migrate_source

    new, findings = migrate_source(old)

A rule is a module in ``rules/``. This is the whole rule for
``torch.backends.cuda.matmul.allow_tf32``:

    PART = "torch"  # `--select torch` runs it; the other parts are "apex" and "mistakes"
    TRIGGERS = ("allow_tf32",)  # a file is read only if it has one of these texts; if a text has
                                # several words, separated by blanks, the file must have them all

    def run(file):
        for use in file.tree.uses:
            if "torch.backends.cuda.matmul.allow_tf32" in use.origins:
                file.say(use.node, "by hand", "use torch.set_float32_matmul_precision")

`Rewriter` is the class of `file`. It has `replace` and `insert` for edits, and `code` for the steps
of training. `Tree` has the names in the file and their origins. The docstring of
``tree/__init__.py`` lists the questions about a file that have an answer already. Put examples of a
rule, as old code and new code, into ``tests/migrate/snippets``.
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
