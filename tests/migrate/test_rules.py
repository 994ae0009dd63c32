"""The registry: what triggers a rule, and that a new one is reached through files."""

import collections
import types

import pytest
from migrate_snippets import SNIPPETS, snippets

from amp_lab import migrate
from amp_lab.migrate import rules

TF32 = "torch.backends.cuda.matmul.allow_tf32"


def new_rule(trigger: str) -> types.ModuleType:
    """The rule in the docstring of `amp_lab.migrate`, with a trigger of its own."""
    text = migrate.__doc__[migrate.__doc__.index("    PART") :].partition("`Rewriter`")[0]
    module = types.ModuleType("new_rule")
    exec("\n".join(line[4:] for line in text.splitlines()), vars(module))
    module.TRIGGERS = (trigger,)
    return module


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_triggers(rule):
    assert rule.TRIGGERS
    assert all(isinstance(trigger, str) and trigger.split() for trigger in rule.TRIGGERS)
    assert rule.PART in rules.SELECTIONS
    assert callable(rule.run)


def test_a_new_rule_is_reached_through_files_and_text_alike(tmp_path, monkeypatch):
    code = f"import torch\n{TF32} = True\n"
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "b.py").write_text("import torch\nx = (\n")  # which no rule is for
    assert list(migrate.migrate_paths([tmp_path])) == []
    monkeypatch.setattr(rules, "RULES", (*rules.RULES, new_rule("allow_tf32")))
    (result,) = migrate.migrate_paths([tmp_path])
    assert [(line.line, line.kind) for line in result.lines] == [(2, "by hand")]
    assert [finding.line for finding in migrate.migrate_source(code)[1]] == [2]


def test_a_rule_whose_trigger_is_wrong_finds_nothing_in_its_tests_either(monkeypatch):
    monkeypatch.setattr(rules, "RULES", (new_rule("allow_fp32"),))
    assert migrate.migrate_source(f"import torch\n{TF32} = True\n")[1] == []


@pytest.mark.parametrize("words", ["torch .scale(", ".scale( torch"])
def test_words_of_a_trigger_must_all_be_there(monkeypatch, words):
    rule = new_rule(words)
    monkeypatch.setattr(rules, "RULES", (rule,))
    assert rules.triggered_rules(b"import torch\nscaler.scale(loss)\n") == [rule]
    assert rules.triggered_rules(b"axis.scale(2)\n") == []
    assert rules.triggered_rules(b"import torch\n") == []


@pytest.mark.parametrize("path", sorted(SNIPPETS.iterdir()), ids=lambda path: path.stem)
def test_each_rule_alone_is_triggered_by_what_it_has_something_to_say_of(monkeypatch, path):
    texts = [text.partition("--- becomes\n")[0] for text in snippets(path.stem).values()]
    by_triggers = collections.defaultdict(list)
    for rule in rules.RULES:
        by_triggers[rule.TRIGGERS].append(rule)
    for alone in by_triggers.values():
        monkeypatch.setattr(rules, "RULES", alone)
        gated = [rules.edits_and_findings(text) for text in texts]
        monkeypatch.setattr(rules, "triggered_rules", lambda data, alone=alone: alone)
        assert [rules.edits_and_findings(text) for text in texts] == gated
        monkeypatch.undo()
