"""Render the site into build/site: `pdm run site [--serve [PORT]]`.

README, the notebooks with their committed outputs, the Markdown pages and the docstrings of the
package become pages that need no server and ask no other host for anything. Nothing is executed. A
link inside the project that leads nowhere is an error.

The sources are gathered in build/site-sources, where each has the path that it has in the
repository, so that links from one to another are the same; README.md is the first page there.
"""

import argparse
import functools
import http.server
import importlib.util
import json
import os
import re
import shutil
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import api_pages
import edition
import failure_pages
import site_search

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # where only the site is built, the package is not installed
OUT = ROOT / "build" / "site"
SETTINGS = ROOT / "site"
FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
INDEX = "notebooks/08_when_amp_breaks.ipynb"
PLAYGROUND = re.compile(r'<div class="playground".*?^</div>$', re.MULTILINE | re.DOTALL)
SUMMARY = re.compile(r"^## Summary", re.MULTILINE)
TITLE = re.compile(r"^# .+$", re.MULTILINE)


class SiteError(Exception):
    """Something in the sources that has to be put right."""


def anchor(heading: str) -> str:
    """The anchor that Jupyter makes of a heading; Sphinx calls this by its name."""
    return heading.replace(" ", "-")


def github_anchor(heading: str) -> str:
    """The anchor that code hosts make of a heading, which the Markdown pages link to."""
    text = re.sub(r"[^\w\- ]", "", heading.lower())
    return text.replace(" ", "-")


def sections(root: Path) -> list[tuple[str, list[str]]]:
    """The left bar: of each section its caption, and its pages as paths in the repository.

    Raises `SiteError` for a page that is in none.
    """
    settings = tomllib.loads((root / "site" / "contents.toml").read_text(encoding="utf-8"))
    listed = []
    for section in settings["section"]:
        section_pages: list[str] = []
        for pattern in section["pages"]:
            section_pages += [pattern] if pattern == "api/index.md" else _matching(root, pattern)
        if section_pages:
            listed.append((section["caption"], section_pages))
    known = {page for _, pages in listed for page in pages}
    for pattern in ("notebooks/[0-9]*.ipynb", "docs/*.md", "*.md", "site/playgrounds/*.md"):
        for page in _matching(root, pattern):
            if page not in known and page != "README.md":
                raise SiteError(f"{page} is in no section: add it to site/contents.toml")
    return listed


def _matching(root: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))


def gather(root: Path, sources: Path) -> None:
    """Put the sources of the site into the folder `sources`, which is emptied first."""
    shutil.rmtree(sources, ignore_errors=True)
    bar = sections(root)
    pages = ["README.md", *(page for _, listed in bar for page in listed)]
    pages_with_source = [page for page in pages if page != "api/index.md"]
    stage = _Stage(root, sources, set(pages_with_source))
    for page in pages_with_source:
        stage.add(page)
    for name, text in api_pages.pages(root / "src" / "amp_lab").items():
        _write(sources / "api" / name, text)
    for name, text in failure_pages.pages(root).items():
        _write(sources / name, stage.with_links(name, text))
    stage.finish_first_page(bar)
    for folder in ("playgrounds", "explain", "static"):
        for file in (root / "site" / folder).glob("*.*"):
            if file.suffix != ".md":
                _write(sources / "_static" / file.name, file.read_bytes())
    _write(sources / "_static" / "reference.js", failure_pages.data_script(root))
    _write(sources / "_static" / "search_data.js", site_search.data_script(root, sources))
    if _matching(root, edition.NOTEBOOKS):
        edition.write_archive(sources / "_static" / edition.ARCHIVE, root)


class _Stage:
    """Pages on their way into the folder of sources, their links fitted to it."""

    def __init__(self, root: Path, sources: Path, pages: set[str]):
        self.root = root
        self.sources = sources
        self.pages = pages
        self.repository = edition.repository()
        settings = tomllib.loads((root / "site" / "contents.toml").read_text(encoding="utf-8"))
        self.playgrounds = {
            notebook: name
            for name, pattern in settings["playgrounds"].items()
            for notebook in _matching(root, pattern)
        }

    def add(self, page: str) -> None:
        """Write a page of the repository into the sources, with its links fitted."""
        text = (self.root / page).read_text(encoding="utf-8")
        if page.endswith(".ipynb"):
            self._add_notebook(page, json.loads(text))
        else:
            to = "index.md" if page == "README.md" else page
            _write(self.sources / to, self.with_links(page, text))

    def _add_notebook(self, page: str, notebook: dict[str, Any]) -> None:
        """Add a notebook, with its links fitted, its playground, and links to run it at the top."""
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
                if page == INDEX:
                    text = _with_box(failure_pages.link_codes(text))
                cell["source"] = self.with_links(page, text)
        name = self.playgrounds.get(page)
        if name is not None:
            self._insert(page, notebook, name)
        first = notebook["cells"][0]
        colab = edition.colab_address(self.repository, Path(page).name)
        links = links_to_run(colab)
        first["source"] = TITLE.sub(
            lambda title: f"{title[0]}\n\n{links}", first["source"], count=1
        )
        _write(self.sources / page, json.dumps(notebook))

    def _insert(self, page: str, notebook: dict[str, Any], name: str) -> None:
        """Put the playground called `name` before the summary of a notebook."""
        whole = (self.root / "site" / "playgrounds" / f"{name}.md").read_text(encoding="utf-8")
        title = edition.HEADING.search(whole)
        found = PLAYGROUND.search(whole)
        if title is None or found is None:
            raise SiteError(f'site/playgrounds/{name}.md: no title, or no <div class="playground">')
        new = f"## {title[1]}\n\n{found[0]}\n\n## Summary"
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown" and SUMMARY.search(cell["source"]):
                # A function, since `sub` would interpret the backslashes of a text.
                cell["source"] = SUMMARY.sub(lambda _: new, cell["source"], count=1)
                return
        raise SiteError(f"{page}: no section `## Summary`, before which its playground would stand")

    def with_links(self, page: str, text: str) -> str:
        """The text of a page with its links as they have to be among the sources.

        A file that a link leads to is copied there, if it is no page.
        """

        def fitted(link: re.Match[str]) -> str:
            # Such as ``](``, ``docs/cli.md`` and ``#options``.
            start, address, fragment = link.groups()
            fragment = fragment or ""
            target = unquote(address)
            path = self.root / page  # of a link to the page itself
            if target:
                path = Path(os.path.normpath(path.parent / target))
            if not path.is_relative_to(self.root):  # it leads out of the repository
                return link[0]
            name = path.relative_to(self.root).as_posix()
            if path.is_file():
                if fragment and name.endswith(".md"):
                    fragment = "#" + _jupyter_anchor(path, fragment[1:])
                if name not in self.pages:
                    _write(self.sources / name, path.read_bytes())
            if name == "README.md" and target:  # it is the first page, index.md
                up = "../" * (len(Path(page).parts) - 1)
                return f"{start}{up}index.md{fragment}"
            return f"{start}{address}{fragment}"

        return edition.LINK.sub(fitted, text)

    def finish_first_page(self, bar: list[tuple[str, list[str]]]) -> None:
        """Add the left bar to the first page, as tables of contents that Sphinx moves to the left.

        The notebooks have the short titles of README's table, all other pages their own.
        """
        first = self.sources / "index.md"
        text = first.read_text(encoding="utf-8")
        # Rows of the table, such as ``| [First steps](notebooks/00_start_here.ipynb)``.
        rows = re.findall(r"\| \[([^]]+)\]\((notebooks/\w+\.ipynb)\)", text)
        titles = {page: title for title, page in rows}
        for caption, pages in bar:
            entries = []
            for page in pages:
                name = _bare(page)
                entries.append(f"{titles[page]} <{name}>" if page in titles else name)
            lines = "\n".join(entries)
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"
        _write(first, text)


def links_to_run(colab: str) -> str:
    """HTML links to open a notebook in Colab, if it has an address there, and to download all."""
    links = [f'<a href="../_static/{edition.ARCHIVE}" download>Download the notebooks (zip)</a>']
    if colab:
        links.insert(0, f'<a href="{colab}">Open in Colab</a>')
    return f'<p class="run-links">{"".join(links)}</p>'


def _with_box(text: str) -> str:
    """The text with the box for messages below its title, if it has one."""
    box = failure_pages.BOX.format(depth=1)
    return re.sub(r"^(# .+)$", rf"\1\n\n{box}", text, count=1, flags=re.MULTILINE)


def _bare(page: str) -> str:
    """A page's name for Sphinx: its path from the top, without the ending."""
    return "/" + page.rpartition(".")[0]


def _jupyter_anchor(path: Path, fragment: str) -> str:
    """The anchor of the heading of a Markdown page that code hosts call `fragment`."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for heading in edition.HEADING.findall(text):
        # Of a link its text alone; without the marks of code and emphasis.
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        if github_anchor(plain) == fragment:
            return anchor(plain)
    return fragment  # there is no such heading: Sphinx reports the link, with its place


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def build(sources: Path, out: Path, *, builder: str = "html", address: str = "") -> int:
    """Run Sphinx on what was gathered; return its exit code. `out` is replaced when all is well."""
    from sphinx.cmd.build import build_main

    os.environ["AMP_LAB_SITE_ADDRESS"] = address
    new = out.with_name(f"{out.name}-new")
    trees = out.with_name(f"{out.name}-doctrees")
    shutil.rmtree(new, ignore_errors=True)
    arguments = ["--quiet", "--fresh-env", "--jobs", "auto", "--builder", builder]
    if builder == "html":
        arguments.append("--fail-on-warning")
    arguments += ["--define", f"html_static_path={sources / '_static'}"]
    arguments += ["--doctree-dir", str(trees), "--conf-dir", str(SETTINGS)]
    arguments += [str(sources), str(new)]
    code = build_main(arguments)
    shutil.rmtree(trees, ignore_errors=True)
    if code == 0 and builder == "html":
        shutil.rmtree(out, ignore_errors=True)
        for leftover in (new / ".buildinfo", new / "objects.inv", new / "searchindex.js"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(new / "_sources", ignore_errors=True)
        (new / ".nojekyll").touch()  # or Pages would leave out _static
        new.rename(out)
    return code


def serve(folder: Path, port: int) -> int:
    """Show the site on this machine until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        print(f"site: port {port} cannot be used ({error}): give another", file=sys.stderr)
        return 2
    with server:
        print(f"http://127.0.0.1:{port}/  (Ctrl-C stops it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Build the site, and show it if asked to; return the exit code."""
    parser = argparse.ArgumentParser(prog="site", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", nargs="?", type=int, const=8000, metavar="PORT")
    parser.add_argument("--address", default="", metavar="URL", help="where it will stand")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="replaced if it is there"
    )
    parser.add_argument("--linkcheck", action="store_true", help="try links to other hosts")
    options = parser.parse_args(arguments)
    if options.address and not re.match(r"https?://\w", options.address):
        print(f"site: --address {options.address}: give it whole, with https://", file=sys.stderr)
        return 2
    missing = [name for name in ("sphinx", "myst_nb", "furo") if not importlib.util.find_spec(name)]
    if missing:
        problem = f"{', '.join(missing)} not installed: run `pdm run sync`"
        print(f"site: {problem}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    address = options.address
    if address:
        address = address.rstrip("/") + "/"
    out = options.out.absolute()
    if out.exists() and not (out / "search.html").exists():
        print(f"site: {out}: there is something else, which is not replaced", file=sys.stderr)
        return 2
    sources = out.with_name(f"{out.name}-sources")
    try:
        gather(ROOT, sources)
    except SiteError as error:
        print(f"site: {error}", file=sys.stderr)
        return 2
    builder = "linkcheck" if options.linkcheck else "html"
    code = build(sources, out, builder=builder, address=address)
    if code or options.linkcheck:
        return code
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    seconds = time.perf_counter() - start
    print(f"{out / 'index.html'}: {size / 1e6:.1f} MB in {seconds:.1f} s", flush=True)
    return serve(out, options.serve) if options.serve is not None else 0


if __name__ == "__main__":
    sys.exit(main())
