"""What `advise` returns: a ranking, what to watch, and the lines to write."""

import base64
import html
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from amp_lab.advisor.recipes import Candidate
from amp_lab.files import MADE_BY, save
from amp_lab.report import Printed, Table, bytes_text


@dataclass(frozen=True, repr=False)
class Advice(Printed):
    """Which precision to use for a model on a device; `str` of it is made to be read."""

    title: str  # the model and the device
    candidates: list[Candidate]  # for each use, the best first
    chosen: dict[str, Candidate]  # by use, "training" and "inference"
    programs: dict[str, str]  # by use: the lines to write, which ran here
    watch: list[str]

    @property
    def recommended(self) -> Candidate | None:
        """What to train with, or to infer with if it cannot be trained; None if nothing can be."""
        return next(iter(self.chosen.values()), None)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write it all as one page, with a picture of the times.

        Raises `OptionError` if that cannot be, and `RequirementError` without matplotlib.
        """
        style = "<style>body{font:16px sans-serif}td,th{padding:.2em .6em;text-align:left}</style>"
        head = f'<!doctype html><meta charset="utf-8"><meta name="generator" content="{MADE_BY}">'
        head += f"<title>{html.escape(self.title)}</title>"
        page = f"{head}{style}{self._repr_html_()}{self._picture()}\n"
        save(Path(path), [page.encode()])

    def _picture(self) -> str:
        """The times as an image in HTML; empty if nothing was timed."""
        panels: dict[str, list[tuple]] = {}
        for c in self.candidates:
            if c.time_s is None:
                continue
            precision = str(c.recipe.precision)
            rest = c.name.removeprefix(precision).lstrip(", ")
            bar = precision, rest, c.time_s.times(1e3), None, f"{c.speedup or ''}"
            panels.setdefault(c.recipe.use, []).append(bar)
        if not panels:
            return ""
        from amp_lab import plots  # matplotlib takes a second to load

        png = base64.b64encode(plots.image(plots.speed_ladder, panels)).decode()
        return f'<p><img alt="time of a step by recipe" src="data:image/png;base64,{png}"></p>'

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self._with_programs("<p>{}</p><pre>{}</pre>", html.escape)

    def __str__(self) -> str:
        return super().__str__() + self._with_programs("\n\n{}\n\n{}").rstrip()

    def to_markdown(self) -> str:
        """The table and the programs, in Markdown."""
        return super().to_markdown() + self._with_programs("\n\n{}\n\n```python\n{}```")

    def _with_programs(self, form: str, escape: Any = str) -> str:
        head = "The lines to write for {} ({}), which ran here:"
        named = {use: head.format(use, best.name) for use, best in self.chosen.items()}
        return "".join(form.format(named[use], escape(p)) for use, p in self.programs.items())

    def _contents(self) -> dict[str, Any]:
        return vars(self) | {
            "recommended": self.recommended and self.recommended.name,
            "chosen": {use: candidate.name for use, candidate in self.chosen.items()},
            "candidates": [vars(c) | {"name": c.name} for c in self.candidates],
        }

    def _table(self) -> Table:
        told = "\n".join(self.watch)
        errors = {c.reason: f"{c.name}: {c.reason}" for c in self.candidates if _is_long(c.reason)}
        return Table(
            ["for", "recipe", "ms", "speed-up", "against fp32", "peak", "batch", "verdict"],
            [_cells(candidate) for candidate in self.candidates],
            caption=self.title,
            facts=["Peak and largest batch are forecasts; a speed-up comes with its interval."],
            advice=[*self.watch, *(line for why, line in errors.items() if why not in told)],
            right=(2, 5, 6),
        )


def _is_long(reason: str) -> bool:
    return len(reason) > 90  # an error, which would make a table of one column


def _cells(c: Candidate) -> list[str]:
    time = f"{1e3 * c.time_s.median:.3g}" if c.time_s and c.time_s.trusted else "-"
    peak = "-" if c.peak_bytes is None else bytes_text(c.peak_bytes)
    batch = "-" if c.largest_batch is None else f"{c.largest_batch:,}"
    why = "see below" if _is_long(c.reason) else c.reason
    verdict = f"{c.verdict}: {why}" if why else c.verdict
    off = c.against_fp32 or "-"
    return [c.recipe.use, c.name, time, str(c.speedup or "-"), off, peak, batch, verdict]
