"""Settings of the site: Sphinx, myst-nb and furo. `tools/build_site.py` gathers its sources."""

import html
import os
import re
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

_ROOT = Path(__file__).resolve().parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where the site will stand, with a slash at its end; empty where that is not known.
_ADDRESS = os.environ.get("AMP_LAB_SITE_ADDRESS", "")

project, version = "AMP Lab", _PROJECT["version"]
language = "en"
extensions = ["myst_nb"]
root_doc = "index"

nb_execution_mode = "off"  # what is shown are the outputs that are committed
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# The anchors that Jupyter makes of headings, since the notebooks link to those.
myst_heading_slug_func = "build_site.anchor"
myst_dmath_double_inline = True
suppress_warnings = ["myst.header"]  # README's table of contents may skip a level

templates_path = ["templates"]
html_theme = "furo"
html_title = "AMP Lab"
html_favicon = "static/favicon.svg"
html_baseurl = _ADDRESS
html_css_files = ["site.css", "playground.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_permalinks_icon = "#"
html_math_renderer = "mathml"
html_use_index = False  # its search does better
html_theme_options = {"navigation_with_keys": True}
add_module_names = False
python_display_short_literal_types = True
linkcheck_timeout = 20
linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)"]

# The scripts of a playground, in the order in which they build on each other.
_SCRIPTS = {
    "number_formats": ["formats.js", "draw_formats.js"],
    "loss_scale": ["formats.js", "scaler.js", "draw_scaler.js"],
    "block_scaling": ["formats.js", "blocks.js", "draw_blocks.js"],
    "memory": ["memory.js", "gpus.js", "draw_memory.js"],
}


def _math(translator, node, *, block: bool) -> None:
    """Formulas as MathML, which browsers draw without a script."""
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def _explain_scripts(pagename, context) -> list[str]:
    """The scripts of the box for messages, and of the search."""
    if pagename == "search":
        return ["lunr.js", "explain.js", "reference.js", "search_data.js", "search.js"]
    if 'class="explain"' in context.get("body", ""):
        return ["lunr.js", "explain.js", "reference.js", "box.js"]
    return []


def _page(app, pagename, templatename, context, doctree) -> None:
    """What only some pages need: the scripts of their playgrounds, and a picture for links."""
    wanted: list[str] = []
    for name in re.findall(r'data-playground="(\w+)"', context.get("body", "")):
        wanted += [script for script in _SCRIPTS[name] if script not in wanted]
    for script in ["playground.js", *wanted] if wanted else []:
        app.add_js_file(script, loading_method="defer")
    for script in _explain_scripts(pagename, context):
        app.add_js_file(script, loading_method="defer")
    up = _ADDRESS or "../" * pagename.count("/")
    tags = {
        "og:type": "website",
        "og:site_name": "AMP Lab",
        "og:title": re.sub(r"<[^>]*>", "", html.unescape(context.get("title", project))),
        "og:description": _PROJECT["description"],
        "og:image": f"{up}_static/opengraph.png",
        "og:image:alt": "A number taken apart into sign, exponent and mantissa, in eight formats",
    }
    if _ADDRESS:
        tags["og:url"] = f"{_ADDRESS}{pagename}.html"
    lines = [f'<meta name="description" content="{html.escape(_PROJECT["description"])}">']
    lines += [f'<meta property="{k}" content="{html.escape(v)}">' for k, v in tags.items()]
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


# What axe finds in the markup of Sphinx and furo, and what it should be.
_REPAIRS = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="On this page">',
    '<th class="head"><p></p></th>': '<td class="head"></td>',
}


def _repair(app, exception) -> None:
    """Put the pages' markup right for those who hear it."""
    for page in Path(app.outdir).rglob("*.html") if exception is None else ():
        text = page.read_text(encoding="utf-8")
        for found, right in _REPAIRS.items():
            text = text.replace(found, right)
        page.write_text(text, encoding="utf-8")


def _sitemap(app, exception) -> None:
    """A sitemap, if the address is known: its entries have to be whole addresses."""
    if exception is not None or not _ADDRESS:
        return
    pages = sorted(app.env.found_docs)
    entries = "\n".join(f"  <url><loc>{_ADDRESS}{page}.html</loc></url>" for page in pages)
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    schema = "http://www.sitemaps.org/schemas/sitemap/0.9"
    text = f'{head}\n<urlset xmlns="{schema}">\n{entries}\n</urlset>\n'
    (Path(app.outdir) / "sitemap.xml").write_text(text, encoding="utf-8")


def setup(app) -> None:
    """Register the above; Sphinx calls it."""

    def inline(translator, node):
        _math(translator, node, block=False)

    def display(translator, node):
        _math(translator, node, block=True)

    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    app.connect("html-page-context", _page)
    app.connect("build-finished", _repair)
    app.connect("build-finished", _sitemap)
