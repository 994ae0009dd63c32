"""Every remedy has a test that does what it says; and the script that lists them."""

import importlib
import pkgutil

import pytest
from remedy_tests import remedies_tested

import amp_lab
import list_remedies
from amp_lab.core.remedies import REMEDIES, remedy


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


def test_the_list_names_remedy_and_test(capsys, monkeypatch):
    assert list_remedies.main() == 0
    out = capsys.readouterr().out
    assert "nonfinite.masked_softmax" in out
    assert "test_nonfinite_remedies::test_a_row_of_attention_that_is_masked_everywhere" in out
    assert out.rstrip().endswith("0 without a test")
    monkeypatch.setitem(REMEDIES, "nonfinite.planted", next(iter(REMEDIES.values())))
    assert list_remedies.main() == 1
    assert capsys.readouterr().out.rstrip().endswith("1 without a test: nonfinite.planted")
