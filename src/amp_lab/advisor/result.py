"""The result of `advise`: a ranking, remarks, and the lines to write."""

import base64
import html
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from amp_lab.advisor.candidates import Candidate
from amp_lab.core.files import GENERATOR, save
from amp_lab.core.report import Printed, Table, bytes_text

_AGAINST_FP32 = (
    "Against fp32: the error of the gradients in the first step, and the fall of the loss in a few "
    "steps, relative to the fall in fp32. For inference, the error of the output."
)
# Tables and programs that are wider than a phone can be scrolled.
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{generator}">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: auto; padding: 1rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto }}
caption {{ display: block; font-weight: bold; text-align: left; margin-bottom: .5em }}
th, td {{ text-align: left; white-space: nowrap; padding: .25em .75em .25em 0 }}
th, td {{ border-bottom: 1px solid #8886 }}
pre {{ background: #8882; border-radius: .25rem; overflow-x: auto; padding: .75rem }}
img {{ background: white; height: auto; max-width: 100% }}
</style>
{body}
</html>
"""


@dataclass(frozen=True, repr=False)
class Advice(Printed):
    """The recommended precision for a model on a device. Print the object to read the advice."""

    title: str  # the model and the device
    candidates: list[Candidate]  # the candidates for each use, best first
    chosen: dict[str, Candidate]  # the recommendation for "training" and "inference"
    programs: dict[str, str]  # the code to write for each use; `advise` has run this code
    watch: list[str]  # remarks on the measurement and the model

    @property
    def recommended(self) -> Candidate | None:
        """The recommended recipe for training, else for inference; None if there is none."""
        return next(iter(self.chosen.values()), None)  # training comes first

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write the advice to one HTML page, with a figure of the times.

        Raises `OptionError` if the page cannot be written, and `RequirementError` without
        matplotlib.
        """
        page = _PAGE.format(
            generator=html.escape(GENERATOR),
            title=html.escape(self.title),
            body=self._repr_html_() + self._picture(),
        )
        save(Path(path), [page.encode()])

    def _picture(self) -> str:
        """The times as an image in HTML; empty if nothing was timed."""
        panels: dict[str, list[tuple]] = {}
        for c in self.candidates:
            if c.time_s is None:
                continue
            precision = str(c.recipe.precision)
            options = c.name.removeprefix(precision).lstrip(", ")  # such as "autocast, compiled"
            milliseconds = c.time_s.times(1e3)
            # As `plots.speed_ladder` takes it; None: the limit of the device is not known.
            bar = (precision, options, milliseconds, None, f"{c.speedup or ''}")
            panels.setdefault(c.recipe.use, []).append(bar)
        if not panels:
            return ""
        from amp_lab import plots  # matplotlib takes a second to load

        png = plots.image(plots.speed_ladder, panels)
        encoded = base64.b64encode(png).decode()
        return f'<p><img alt="time of a step by recipe" src="data:image/png;base64,{encoded}"></p>'

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self._with_programs("<p>{}</p><pre>{}</pre>", html.escape)

    def text(self, width: int | None = None) -> str:
        """The table and the programs as text; wrapped to `width` characters, if given."""
        return super().text(width) + self._with_programs("\n\n{}\n\n{}").rstrip()

    def to_markdown(self) -> str:
        """The table and the programs, in Markdown."""
        return super().to_markdown() + self._with_programs("\n\n{}\n\n```python\n{}```")

    def _with_programs(self, form: str, escape: Any = str) -> str:
        """For each program the template `form`, filled with its heading and, escaped, its code."""
        text = ""
        for use, program in self.programs.items():
            head = f"The code for {use} ({self.chosen[use].name}), which ran on this machine:"
            text += form.format(head, escape(program))
        return text

    def _contents(self) -> dict[str, Any]:
        """All fields for JSON; recipes are given by name."""
        recommended = None if self.recommended is None else self.recommended.name
        return vars(self) | {
            "recommended": recommended,
            "chosen": {use: candidate.name for use, candidate in self.chosen.items()},
            "candidates": [vars(c) | {"name": c.name} for c in self.candidates],
        }

    def _table(self) -> Table:
        """A row for each candidate, and the remarks below."""
        facts = [
            "The peak and the largest batch are forecasts. Each speed-up is shown with its 95 % "
            "interval."
        ]
        if any(candidate.against_fp32 for candidate in self.candidates):
            facts.append(_AGAINST_FP32)
        return Table(
            ["for", "recipe", "ms", "speed-up", "against fp32", "peak", "batch", "verdict"],
            [_cells(candidate) for candidate in self.candidates],
            caption=self.title,
            facts=facts,
            advice=[*self.watch, *self._reasons()],
            right=(2, 5, 6),
        )

    def _reasons(self) -> list[str]:
        """The reasons of verdicts, one sentence for all recipes that share one.

        A reason that a remark gives already is left out.
        """
        remarks = "\n".join(self.watch)
        recipes: dict[tuple[str, str], list[str]] = {}  # by verdict and reason
        for c in self.candidates:
            if c.reason and c.reason not in remarks:
                name = f"{c.recipe.use} in {c.name}"
                recipes.setdefault((c.verdict, c.reason), []).append(name)
        reasons = []
        for (verdict, reason), names in recipes.items():
            reasons.append(f"{verdict} ({'; '.join(names)}): {reason}")
        return reasons


def _cells(c: Candidate) -> list[str]:
    """The cells of a candidate's row; ``-`` for a figure that is missing or not trusted."""
    milliseconds = ""
    if c.time_s and c.time_s.trusted:
        milliseconds = f"{1e3 * c.time_s.median:.3g}"
    speedup = ""
    if c.speedup and c.speedup.trusted:
        speedup = str(c.speedup)
    peak = ""
    if c.peak_bytes is not None:
        peak = bytes_text(c.peak_bytes)
    batch = ""
    if c.largest_batch is not None:
        batch = f"{c.largest_batch:,}"
    figures = [milliseconds, speedup, c.against_fp32, peak, batch]
    return [c.recipe.use, c.name, *[figure or "-" for figure in figures], c.verdict]
