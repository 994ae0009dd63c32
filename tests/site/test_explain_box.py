"""The box "Paste your message" and the search of the site, in a real browser."""

import json
from pathlib import Path

import pytest
from site_pages import ROOT, chromium, needs_sphinx, run_build

from amp_lab.failures import Failure, load_reference, read_explanation

pytestmark = pytest.mark.slow
INDEX = "notebooks/08_when_amp_breaks.html"
REFERENCE = load_reference()
SEEN = json.loads((ROOT / "tests" / "failures" / "seen.json").read_text(encoding="utf-8"))
OTHER = json.loads(
    (ROOT / "tests" / "failures" / "other_subjects.json").read_text(encoding="utf-8")
)
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 42, in step
    loss.backward()
RuntimeError: Found dtype Float but expected Half"""
CUSTOM_BACKWARD = """    return user_fn(self, *args)
  File "/home/me/ops.py", line 9, in backward
    return torch.mm(g, w)
RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float"""
UNKNOWN = [
    "KeyError: 'labels'",
    "ValueError: could not write the checkpoint to the cluster",
    "",
    "hello",
    "AMP9999",
    "double free or corruption (out)",
    "Early stopping does not trigger although the validation loss gets worse",
]
CODES = [
    "AMP0004",
    "amp0004",
    "\x1b[31mAMP0004\x1b[0m",
    "AMP00040",
    "use torch.finfo(x.dtype).min instead of the number (AMP0004).",
    "(AMP0020); (AMP0004); (amp0020) expected scalar type BFloat16 but found Float",
    "AMP9999 the loss is NaN in fp16",
]
ANSWER = """(text) => {
  const found = AmpExplain.explain(text, AmpReference, lunr.Index.load(AmpReference.index));
  const line = found.ownLine && [found.ownLine.file, found.ownLine.line];
  return [found.codes, found.nearest, line];
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    needs_sphinx()
    out = tmp_path_factory.mktemp("built") / "site"
    done = run_build("--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def page(site):
    with chromium() as browser:
        yield browser.new_page()


def in_python(text: str) -> list:
    found = read_explanation(text)
    codes = [failure.code for failure in found.failures if failure.code in REFERENCE.failures]
    nearest = [near.code if isinstance(near, Failure) else near.page for near in found.nearest]
    line = found.own_line and [found.own_line.file, found.own_line.line]
    return [codes, nearest, line]


def test_the_browser_and_the_command_give_the_same_answers(page, site):
    page.goto((site / INDEX).as_uri())
    texts = [case["text"] for case in SEEN + OTHER] + UNKNOWN + CODES + [TRACEBACK, CUSTOM_BACKWARD]
    for failure in REFERENCE.failures.values():
        texts += [*failure.messages, *failure.symptoms]
    assert len(texts) > 200
    for text in texts:
        assert page.evaluate(ANSWER, text) == in_python(text), text


@pytest.mark.parametrize("width", [1300, 390])
def test_a_message_is_pasted_and_leads_to_its_page(page, site, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((site / INDEX).as_uri())
    page.get_by_label("Paste your message").fill(TRACEBACK)
    answer = page.locator(".explain-answer")
    answer.get_by_text("The fix", exact=True).wait_for()
    assert "/home/me/train.py:42" in answer.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    answer.get_by_role("link").first.click()
    page.wait_for_url("**/failures/AMP*.html")
    assert page.locator("h1").count() == 1


def test_an_unknown_message_is_called_so(page, site):
    page.goto((site / INDEX).as_uri())
    page.get_by_label("Paste your message").fill("KeyError: 'labels'")
    page.locator(".explain-answer", has_text="Unknown").wait_for()


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [
        ("RuntimeError: expected scalar type BFloat16 but found Float", "failures/AMP0018.html"),
        ("why is the loss scale falling towards zero every step", "failures/AMP0002.html"),
        ("which numbers does float16 have", "notebooks/01_number_formats.html"),
        ("bf16 vs fp16 which one should I use", "notebooks/19_choose_your_precision.html"),
        ("how much memory does amp save", "notebooks/06_caltech256_resnet50.html"),
        # All words are search words of the failure, which its page does not show.
        ("fp16=True flag ignored and weights unchanged", "failures/AMP0178.html"),
    ],
)
def test_the_search_does_not_need_every_word(page, site, words, leads_to):
    page.goto(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
    links = page.locator("ul.search a")
    links.first.wait_for()
    first_two = links.evaluate_all("links => links.slice(0, 2).map((link) => link.href)")
    assert any(leads_to in link for link in first_two), first_two


def test_a_search_without_a_result_says_so(page, site):
    page.goto(f"{(site / 'search.html').as_uri()}?q=zzzxqqq")
    page.get_by_text("Nothing was found").wait_for()


def test_each_failure_has_a_page_whose_title_is_its_message(site):
    for code, failure in REFERENCE.failures.items():
        text = (site / "failures" / f"{code}.html").read_text(encoding="utf-8")
        assert code in text
        if not failure.messages:
            title = failure.title.replace("`", "")
            assert f"<title>{title[:5]}" in text
