"""Every remedy has a test that does what it says; and the script that lists them."""

import importlib
import pkgutil

import pytest
from remedy_tests import remedies_tested

import amp_lab
import list_remedies
from amp_lab import explain
from amp_lab.core.remedies import REMEDIES, remedy
from amp_lab.failures import load_reference


def test_every_remedy_has_a_test_and_every_test_a_remedy():
    found = list_remedies.all_remedies()
    assert set(found) == set(remedies_tested())
    assert len(found) > 30


def test_a_module_that_defines_one_is_among_those_that_are_read():
    before = set(list_remedies.all_remedies())
    for module in pkgutil.walk_packages(amp_lab.__path__, "amp_lab."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    assert set(REMEDIES) == before


def test_a_code_is_given_once():
    code = next(iter(list_remedies.all_remedies()))
    with pytest.raises(ValueError, match=code):
        remedy(code, "", "")


def test_the_failure_of_a_remedy_is_in_the_reference_and_ends_its_text():
    failures = load_reference().failures
    with_failure = [found for found in list_remedies.all_remedies().values() if found.failure]
    assert len(with_failure) > 40
    for found in with_failure:
        assert found.failure in failures, found.code
        assert found.text.removesuffix(".").endswith(f" ({found.failure})"), found.text
        assert found.text.count("AMP0") == 1, found.text
        assert explain(found.text)[0].code == found.failure


@pytest.mark.parametrize(
    ("text", "shown"),
    [("cast x", "cast x (AMP0018)"), ("Cast x. Then {y}.", "Cast x. Then z (AMP0018).")],
)
def test_the_code_of_the_failure_ends_the_sentence(text, shown, monkeypatch):
    monkeypatch.setattr("amp_lab.core.remedies.REMEDIES", {})
    assert remedy("a.b", "", text, failure="AMP0018").sentence(y="z") == shown
    assert remedy("a.c", "", text).text == text


def test_the_list_names_remedy_and_test(capsys, monkeypatch):
    assert list_remedies.main() == 0
    out = capsys.readouterr().out
    assert "nonfinite.masked_softmax" in out
    assert "test_nonfinite_remedies::test_a_row_of_attention_that_is_masked_everywhere" in out
    assert out.rstrip().endswith("0 without a test")
    monkeypatch.setitem(REMEDIES, "nonfinite.planted", next(iter(REMEDIES.values())))
    assert list_remedies.main() == 1
    assert capsys.readouterr().out.rstrip().endswith("1 without a test: nonfinite.planted")
