"""A reader's session in a real browser, with the container and with plain `pdm run lab`."""

import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from conftest import OWNER, ROOT, TOKEN, Service, free_port

NAME = "03_grad_scaler_step_by_step"
CELL_TIMEOUT_MS = 120_000
CHROMIUM_OPTIONS = [
    "--no-sandbox",  # which refuses to run as root otherwise, as in CI
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    """The Chromium that is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("a browser test: install Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(params=["container", "host"])
def session(request, tmp_path) -> tuple[str, Path, int]:
    """A running JupyterLab: its address, the checkout that it serves, and the owner of that."""
    if request.param == "container":
        lab = request.getfixturevalue("lab")
        yield f"http://127.0.0.1:{lab.settings['AMP_LAB_PORT']}", lab.checkout, OWNER
        return
    checkout, port = tmp_path / "checkout", free_port()
    ignore = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".ipynb_checkpoints")
    shutil.copytree(ROOT, checkout, ignore=ignore)
    settings = {"HOME": str(tmp_path), "JUPYTER_TOKEN": TOKEN, "AMP_LAB_DEVICE": "cpu"}
    command = [sys.executable, checkout / "tools" / "lab.py", f"--port={port}", "--no-browser"]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}", checkout, os.geteuid()
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        finally:
            server.kill()  # for one that did not stop


def sign_in(page: Page, address: str) -> None:
    """Open JupyterLab without the token in the address, and type it into the form."""
    end = time.monotonic() + 30
    while True:
        try:
            page.goto(f"{address}/lab?reset")
            break
        except Exception:  # the server of the host is still starting
            assert time.monotonic() < end, "no answer"
            time.sleep(0.5)
    page.get_by_label("Password or token").fill(TOKEN)
    page.get_by_role("button", name="Log in", exact=True).click()
    page.wait_for_selector("#jp-main-dock-panel", timeout=60_000)
    # Until then, what an earlier test had open may still be kept, and come back.
    page.wait_for_url(lambda url: "reset" not in url, timeout=60_000)


def open_notebook(page: Page, address: str, file: str) -> None:
    """Open a notebook of notebooks/, and wait until its kernel is idle."""
    page.goto(f"{address}/lab/tree/notebooks/{file}?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    expect(page.get_by_text("(ipykernel) | Idle")).to_be_visible(timeout=60_000)


def run_all(page: Page) -> None:
    """Run all cells, and wait until the last has ended."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).first.click()
    expect(page.get_by_text("(ipykernel) | Busy")).to_be_visible(timeout=20_000)
    expect(page.get_by_text("(ipykernel) | Idle")).to_be_visible(timeout=CELL_TIMEOUT_MS)


def count(page: Page, kind: str) -> int:
    """How many outputs of a kind there are in all cells, seen or scrolled out of sight."""
    found, top = 0, 0
    panel = ".jp-Notebook .jp-WindowedPanel-outer"
    while True:
        page.eval_on_selector(panel, f"panel => panel.scrollTop = {top}")
        time.sleep(0.3)
        found += page.locator(f'.jp-OutputArea-output[data-mime-type="{kind}"]').count()
        height, view = page.eval_on_selector(panel, "p => [p.scrollHeight, p.clientHeight]")
        top += view
        if top >= height:
            return found


def write_back(contents: dict[Path, bytes]) -> None:
    """Undo what the reader did, for the tests that come after."""
    for file, content in contents.items():
        file.write_bytes(content)


def test_a_readers_session(browser, session, request):
    address, checkout, owner = session
    source, pair = files = [checkout / "notebooks" / f"{NAME}.{kind}" for kind in ("py", "ipynb")]
    request.addfinalizer(partial(write_back, {file: file.read_bytes() for file in files}))
    page = browser.new_page(viewport={"width": 1300, "height": 1200})
    sign_in(page, address)

    open_notebook(page, address, f"{NAME}.ipynb")
    run_all(page)
    assert count(page, "application/vnd.jupyter.error") == 0
    assert count(page, "application/vnd.jupyter.stderr") == 0
    assert count(page, "application/vnd.jupyter.stdout") > 5
    assert count(page, "image/png") >= 1

    page.eval_on_selector(".jp-Notebook .jp-WindowedPanel-outer", "panel => panel.scrollTop = 0")
    editor = page.locator(".jp-Notebook .jp-CodeCell .cm-content").first
    editor.click()
    page.keyboard.press("Control+End")
    page.keyboard.type("\n# a remark of the reader")
    page.keyboard.press("Control+s")
    end = time.monotonic() + 20
    while "a remark of the reader" not in source.read_text():
        assert time.monotonic() < end, "not saved"
        time.sleep(0.3)
    assert "a remark of the reader" in pair.read_text()
    assert {path.stat().st_uid for path in (source, pair)} == {owner}

    open_notebook(page, address, f"{NAME}.ipynb")
    expect(page.locator(".jp-Notebook")).to_contain_text("a remark of the reader")
    page.close()


def test_it_opens_on_the_first_notebook_and_lists_each_once_with_its_whole_name(browser, session):
    address, checkout, _ = session
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    sign_in(page, address)
    page.goto(f"{address}/")
    expect(page.locator(".jp-Notebook")).to_contain_text("Train with AMP in five minutes")
    expect(page.get_by_text("(ipykernel) | Idle")).to_be_visible(timeout=60_000)
    listed = page.locator(".jp-DirListing-item .jp-DirListing-itemText")
    notebooks = sorted(path.name for path in (checkout / "notebooks").glob("[0-9]*.ipynb"))
    found = listed.all_inner_texts()
    assert sorted(name for name in found if name.endswith((".ipynb", ".py"))) == notebooks
    cut = "items => items.filter(i => i.scrollWidth > i.clientWidth).map(i => i.innerText)"
    assert all(len(name) > 28 for name in listed.evaluate_all(cut))  # as many fit into the list
    page.close()


def test_the_address_that_the_container_prints_opens_the_first_notebook(browser, image):
    """The only address in the log, with the token that JupyterLab has drawn."""
    port = free_port()
    service = Service(image, AMP_LAB_PORT=str(port))
    service.settings["COMPOSE_PROJECT_NAME"] = "amp-lab-address"
    service.compose("up", "--detach", "--no-build")
    try:
        service.wait(service.is_healthy, "healthy")
        (address,) = set(re.findall(r"\w+://\S+", service.log()))
        assert address.startswith(f"http://127.0.0.1:{port}/")
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        expect(page.locator(".jp-Notebook")).to_contain_text("Train with AMP in five minutes")
        expect(page.get_by_text("(ipykernel) | Idle")).to_be_visible(timeout=60_000)
        page.close()
        processes = service.run_inside("sh", "-c", "cat /proc/[0-9]*/comm").split()
        assert set(processes) <= {"tini", "python", "sh", "cat"}  # no language server
    finally:
        service.compose("down", "--timeout", "5", check=False)


def test_opening_a_notebook_and_saving_it_untouched_changes_nothing(browser, session):
    address, checkout, _ = session
    page = browser.new_page(viewport={"width": 1300, "height": 1200})
    sign_in(page, address)
    files = [checkout / "notebooks" / f"{NAME}.{kind}" for kind in ("py", "ipynb")]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    open_notebook(page, address, f"{NAME}.ipynb")
    assert page.locator(".lm-TabBar-tab.jp-mod-dirty").count() == 0
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Control+s")
    end = time.monotonic() + 20
    while files[1].stat().st_mtime_ns == before[1][1]:
        assert time.monotonic() < end, "not saved"
        time.sleep(0.3)
    page.close()
    assert [file.read_bytes() for file in files] == [content for content, _ in before]
