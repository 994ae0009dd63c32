"""The rendered site: its pages in a browser, and what stops a build."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from site_pages import ROOT, chromium, needs_sphinx, run_build

import build_site
import edition
from conftest import WEEKLY

pytestmark = pytest.mark.slow
PLAY = "site/playgrounds"
PLAYGROUNDS = ("number_formats", "loss_scale", "block_scaling", "memory")
LOOKED_AT = ["index.html", "api/train.html"]
LOOKED_AT += [f"{PLAY}/{name}.html" for name in PLAYGROUNDS]
ELSEWHERE = re.compile(r'<(?:script|link rel="(?!canonical)|img)[^>]* (?:src|href)="(?:https?:)?//')
MAX_FIRST_PAGE, MAX_SITE = 300_000, 25_000_000
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
# Formulas are left out: their indices are smaller, as they are in print.
SMALL_TEXT = """() => {
  const small = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest("math")) continue;
    if (!element.checkVisibility()) continue;
    const drawing = element.ownerSVGElement ? element.getScreenCTM().a : 1;
    const size = parseFloat(getComputedStyle(element).fontSize) * drawing;
    if (size < 11.99) small.add(`${element.outerHTML.slice(0, 100)} ${size}`);
  }
  return [...small];
}"""
SMALL_CONTROLS = """() => {
  const small = [];
  for (const control of document.querySelectorAll(".pg button, .pg input, .pg select")) {
    const target = control.type === "radio" ? control.closest("label") : control;
    const { width, height } = target.getBoundingClientRect();
    const shown = target.checkVisibility();
    if (shown && Math.min(width, height) < 36) small.push([control.outerHTML, width, height]);
  }
  return small;
}"""
SIZES = """(drawings) => drawings.map((drawing) => {
  const { width, height, right } = drawing.getBoundingClientRect();
  return [width, height, right];
})"""
FOCUS_IS_SEEN = """() => {
  const { outlineStyle, outlineWidth, boxShadow } = getComputedStyle(document.activeElement);
  return (outlineStyle !== "none" && parseFloat(outlineWidth) > 0) || boxShadow !== "none";
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The whole site, in which no warning came up."""
    needs_sphinx()
    out = tmp_path_factory.mktemp("built") / "site"
    address = "https://example.org/amp-lab"
    done = run_build("--out", out, "--address", address, GITHUB_REPOSITORY="owner/name")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser, site) -> Callable:
    """Opens a page from its file; what it logs and asks for must be nothing."""
    faults: list[str] = []
    pages = []

    def opened(name: str, **options):
        page = browser.new_page(**options)
        pages.append(page)
        page.on("pageerror", lambda error: faults.append(f"{name}: {error}"))
        page.on("request", lambda request: outside(name, request.url))
        page.on("console", lambda message: logged(name, message))
        page.goto((site / name).as_uri())
        return page

    def outside(name: str, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            faults.append(f"{name} asks for {url}")

    def logged(name: str, message) -> None:
        if message.type in ("error", "warning"):
            faults.append(f"{name}: {message.text}")

    yield opened
    for page in pages:
        page.close()
    assert faults == []


def names(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))


def test_every_page_opens_without_an_error_or_a_request(visit, site):
    page = visit("index.html")
    pages = names(site)
    assert len(pages) > 30
    for name in pages if WEEKLY else pages[::4]:
        page.goto((site / name).as_uri())
        assert page.locator("h1").count() == 1, name


def test_the_site_is_small_and_whole(site):
    files = [file for file in site.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < MAX_SITE
    first = (site / "index.html").read_text(encoding="utf-8")
    used = re.findall(r'(?:href|src)="((?:_static/)[^"?]+)', first)
    assert sum((site / name).stat().st_size for name in [*used, "index.html"]) < MAX_FIRST_PAGE
    for notebook in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        assert (site / "notebooks" / f"{notebook.stem}.html").exists()
        assert f'href="notebooks/{notebook.stem}.html"' in first  # the left bar
    for file in files:
        if file.suffix == ".html":
            text = file.read_text(encoding="utf-8")
            assert not ELSEWHERE.search(text), file


def links_to_run(page: Path) -> list[str]:
    """Where the links below the title of a notebook's page lead."""
    found = re.search(r'<p class="run-links">(.*?)</p>', page.read_text(encoding="utf-8"))
    return re.findall(r'href="([^"]*)"', found[1]) if found else []


def test_each_notebook_opens_in_colab_and_can_be_downloaded(site, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.setattr(edition, "_commit", lambda root: "1" * 40)
    edition.write(tmp_path / edition.BRANCH)  # the published layout: this branch and the site
    for notebook in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        page = site / "notebooks" / f"{notebook.stem}.html"
        colab, download = links_to_run(page)
        before, _, published = colab.partition("/owner/name/blob/")
        assert before == "https://colab.research.google.com/github"
        assert (tmp_path / published).is_file()
        with zipfile.ZipFile(page.parent / download) as archive:
            names = archive.namelist()
        assert f"amp-lab/notebooks/{notebook.name}" in names
        assert "amp-lab/notebooks/course/start.py" in names


def test_without_an_address_there_is_only_the_download():
    assert "Colab" not in build_site.links_to_run("")
    assert edition.ARCHIVE in build_site.links_to_run("")


def test_an_address_makes_a_sitemap_and_whole_links_to_the_picture(site):
    sitemap = (site / "sitemap.xml").read_text(encoding="utf-8")
    assert "<loc>https://example.org/amp-lab/api/tracing.html</loc>" in sitemap
    text = (site / "api" / "tracing.html").read_text(encoding="utf-8")
    picture = "https://example.org/amp-lab/_static/opengraph.png"
    assert f'<meta property="og:image" content="{picture}">' in text
    assert (site / "_static" / "opengraph.png").stat().st_size > 5000


def test_search_works_from_a_file(visit):
    page = visit("search.html")
    page.goto(f"{page.url}?q=underflow")
    page.wait_for_selector("ul.search li a")
    assert "01_number_formats.html" in " ".join(
        page.locator("ul.search li a").evaluate_all("links => links.map((a) => a.href)")
    )


def test_a_section_that_was_found_opens_at_its_heading(visit):
    page = visit("search.html")
    page.goto(f"{page.url}?q=gradient+accumulation+recipe")
    page.locator("ul.search li a").first.wait_for()
    link = page.locator("ul.search li a[href*='#']").first
    anchor = unquote(link.get_attribute("href").partition("#")[2])
    link.click()
    page.wait_for_function("scrollY > 300")
    assert page.locator(f"[id='{anchor}']").count() == 1


def test_the_api_pages_have_signatures_examples_and_links(site):
    text = (site / "api" / "tracing.html").read_text(encoding="utf-8")
    assert 'id="amp_lab.forecast_memory"' in text
    assert 'href="#amp_lab.MemoryForecast"' in text
    assert "<code>" not in re.findall(r"<h1>.*?</h1>", text, re.DOTALL)[0].replace("code class", "")
    numerics = (site / "api" / "numerics.html").read_text(encoding="utf-8")
    assert "highlight" in numerics  # ScaleLog's example


def test_from_the_first_page_to_0_1_in_e4m3_in_three_clicks(visit):
    page = visit("index.html", viewport={"width": 1300, "height": 900})
    page.get_by_role("link", name="Play with number formats").first.click()
    row = page.get_by_role("row").filter(has=page.get_by_label("E4M3"))
    assert "0.1015625" in row.inner_text()


def test_a_number_is_taken_apart_by_keyboard_alone(visit):
    page = visit(f"{PLAY}/number_formats.html")
    field = page.get_by_label("Your number")
    field.fill("70000")
    status = page.locator(".pg-status")
    assert re.match(r"In E4M3, 70000 .* 448, .*99\.4 % off .*saturates", status.inner_text())
    field.press("Tab")  # to the roundings
    page.keyboard.press("Tab")  # to the table, which can be scrolled
    page.keyboard.press("Tab")  # to the chosen format
    page.keyboard.press("ArrowUp")  # E5M2
    assert status.inner_text() == "In E5M2, 70000 becomes inf (overflows)."
    for _ in range(3):
        page.keyboard.press("ArrowUp")
    assert status.inner_text().startswith("In tf32, 70000 becomes 70016")
    page.keyboard.press("Tab")  # to the bits, of which one is a tab stop
    assert page.evaluate("document.activeElement.ariaLabel") == "sign bit 18, is 0"
    page.keyboard.press("Enter")
    assert status.inner_text().startswith("In tf32, -70016 becomes -70016, exactly")
    assert field.input_value().startswith("0x")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("exponent bit 17")


@pytest.mark.parametrize("typed", ["½", "1" * 2**20, "", "0x", "one", "<b>1</b>", "1e", "0,1"])
def test_what_cannot_be_read_is_said_in_a_line(visit, typed):
    page = visit(f"{PLAY}/number_formats.html")
    field = page.get_by_label("Your number")
    field.evaluate(
        "(field, text) => { field.value = text; field.dispatchEvent(new Event('input')); }", typed
    )
    line = page.locator(".pg-problem").inner_text()
    assert 20 < len(line) < 140
    assert field.get_attribute("aria-invalid") == "true"
    assert "becomes 0.1015625" in page.locator(".pg-status").inner_text()  # as it was
    field.fill("0.2")
    assert field.get_attribute("aria-invalid") is None
    assert page.locator(".pg-problem").inner_text() == ""


def test_stochastic_rounding_is_right_in_the_mean(visit):
    page = visit(f"{PLAY}/number_formats.html")
    page.get_by_label("stochastic").check()
    page.get_by_label("Your number").fill("0.1")
    said = page.locator(".pg p", has_text="The mean of 10,000 draws is").inner_text()
    mean = float(re.search(r"draws is ([\d.]+\d)", said)[1])
    assert abs(mean - 0.1) < 0.0002  # five standard errors of a step of 0.0078


def test_the_scaler_finds_its_place(visit):
    page = visit(f"{PLAY}/loss_scale.html")
    status, said = page.locator(".pg-status").all()
    assert "Many become zero: raise the scale." in status.inner_text()
    slider = page.get_by_role("slider", name="Loss scale")
    slider.focus()
    for _ in range(16):
        page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "2¹⁶ = 65,536"
    assert "This scale works." in status.inner_text()
    page.get_by_role("button", name="100 steps").click()
    assert re.search(
        r"Step 100: .* [1-9]\d* steps were skipped|step was skipped", said.inner_text()
    )
    page.get_by_label("Good steps before").fill("0")
    assert "whole number from 1 to 2000" in page.locator(".pg-problem").inner_text()


def test_blocks_and_memory_answer_what_is_typed(visit):
    page = visit(f"{PLAY}/block_scaling.html")
    page.get_by_label("Values", exact=True).select_option("typed")
    assert re.search(
        r"MXFP4 per 32 values: 87\.5 % .*zero", page.locator(".pg-status").inner_text()
    )
    page.get_by_label("Your values").fill("1, two")
    assert "“two” is no number" in page.locator(".pg-problem").inner_text()
    page = visit(f"{PLAY}/memory.html")
    page.get_by_label("Parameters").fill("1B")
    assert "fp32 or tf32: 14.9 GiB" in page.locator(".pg-status").inner_text()
    page.get_by_label("Sharding").select_option("fsdp")
    assert "fp32 or tf32: 1.86 GiB" in page.locator(".pg-status").inner_text()
    page.get_by_label("Parameters").fill("many")
    assert "“many” is no number" in page.locator(".pg-problem").inner_text()


def test_playgrounds_stand_in_the_notebooks_that_teach_them(visit):
    page = visit("notebooks/01_number_formats.html")
    assert page.locator("#play-with-number-formats .pg-status").inner_text().startswith("In E4M3")


def test_without_javascript_there_is_a_table(visit):
    page = visit(f"{PLAY}/number_formats.html", java_script_enabled=False)
    assert "0.1015625" in page.locator(".playground table").inner_text()


def test_no_page_is_wider_than_a_phone(visit, site):
    page, wide = visit("index.html", viewport=PHONE), []
    pages = names(site)
    for name in pages if WEEKLY else [*LOOKED_AT, *pages[::10]]:
        page.goto((site / name).as_uri())
        if page.evaluate("document.documentElement.scrollWidth") > PHONE["width"]:
            wide.append(name)
    assert wide == []


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_no_text_is_below_12_pixels(visit, site, viewport):
    page = visit("search.html", viewport=viewport)
    for name in [*LOOKED_AT, "notebooks/08_when_amp_breaks.html"]:
        page.goto((site / name).as_uri())
        if name.endswith("loss_scale.html"):
            page.get_by_role("button", name="100 steps").click()
        assert page.evaluate(SMALL_TEXT) == [], name


@pytest.mark.parametrize("name", PLAYGROUNDS)
def test_a_playground_suits_a_finger_and_a_small_screen(visit, name):
    page = visit(f"{PLAY}/{name}.html", viewport=PHONE)
    drawings = page.locator(".pg svg:not(.pg-swatch)").evaluate_all(SIZES)
    assert drawings
    for width, height, right in drawings:
        assert width > 300, drawings
        assert height > 20, drawings
        assert right < PHONE["width"], drawings
    assert page.evaluate(SMALL_CONTROLS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_do_not_glare_in_dark_mode(visit, site, scheme):
    page = visit("index.html", color_scheme=scheme)
    for name in ("index.html", "notebooks/00_start_here.html"):
        page.goto((site / name).as_uri())
        image = page.locator("article img").first
        dimmed = image.evaluate("(image) => getComputedStyle(image).filter")
        assert dimmed == ("brightness(0.85)" if scheme == "dark" else "none"), name


def test_the_keyboard_shows_where_it_is(visit, site):
    page = visit("search.html", viewport=DESKTOP)
    for name in ("search.html", "notebooks/08_when_amp_breaks.html", LOOKED_AT[2]):
        page.goto((site / name).as_uri())
        for _ in range(70):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            focused = page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
            assert page.evaluate(FOCUS_IS_SEEN), (name, focused)


def test_the_page_of_the_search_has_a_field(visit):
    page = visit("search.html", viewport=PHONE)
    page.get_by_label("Type words").fill("gradient underflow")
    page.keyboard.press("Enter")
    page.locator("ul.search a").first.wait_for()
    assert page.get_by_label("Type words").input_value() == "gradient underflow"
    assert "---" not in page.locator("ul.search").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_out(visit, site, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    page, faults = visit("index.html", color_scheme=scheme), []
    options = {"preload": False}  # it would ask for the style sheets once more
    looked_at = names(site) if WEEKLY else LOOKED_AT
    if scheme == "dark" and not WEEKLY:  # of which all but the colours is the same
        options["runOnly"], looked_at = ["color-contrast"], LOOKED_AT[1:3]
    for name in looked_at:
        page.goto((site / name).as_uri())
        for fault in axe.Axe().run(page, options=options).response["violations"]:
            faults.append((name, fault["id"], [node["html"][:200] for node in fault["nodes"]][:3]))
    assert faults == []


def small_root(folder: Path, readme: str) -> Path:
    """A repository with a first page alone."""
    (folder / "site").mkdir()
    (folder / "src" / "amp_lab").mkdir(parents=True)
    (folder / "README.md").write_text(readme)
    (folder / "src" / "amp_lab" / "__init__.py").write_text('"""Doc."""\n_EXPORTS = {}\n')
    data = folder / "src" / "amp_lab" / "failures" / "data"
    data.mkdir(parents=True)
    dictionaries = ("synonyms", "questions", "clues", "named", "described", "contradicted")
    lists = ("subject_words", "alarms", "one_cause", "other_subjects")
    reference: dict = {key: {} for key in dictionaries} | {key: [] for key in lists}
    reference["pages"] = [{"page": "README.md", "title": "Title", "words": ""}]
    (data / "search.json").write_text(json.dumps(reference))
    toml = '[[section]]\ncaption = "A"\npages = ["api/index.md"]\n[playgrounds]\n'
    (folder / "site" / "contents.toml").write_text(toml)
    return folder


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    needs_sphinx()
    links = ["docs/gone.md", "notebooks/99_gone.ipynb", "#no-such-section"]
    root = small_root(tmp_path, "# Title\n" + "".join(f"\n[this]({link})\n" for link in links))
    build_site.gather(root, tmp_path / "sources")
    program = (
        "import sys, build_site; from pathlib import Path;"
        "sys.exit(build_site.build(Path('sources'), Path('out').absolute()))"
    )
    settings = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT / "tools")}}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, **settings, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("cross-reference target not found") == len(links)
    assert not (tmp_path / "out").exists()


def test_a_page_in_no_section_is_named(tmp_path):
    root = small_root(tmp_path, "# Title\n")
    (root / "docs").mkdir()
    (root / "docs" / "new.md").write_text("# New\n")
    with pytest.raises(build_site.SiteError, match=r"docs/new\.md .*no section"):
        build_site.gather(root, tmp_path / "sources")


def test_nothing_else_is_replaced_and_a_wrong_address_is_refused(tmp_path):
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("the group 'site' is not installed")
    (tmp_path / "thesis.txt").write_text("mine")
    done = run_build("--out", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (tmp_path / "thesis.txt").exists()
    done = run_build("--address", "example.org")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
