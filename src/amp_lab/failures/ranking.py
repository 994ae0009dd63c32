"""Rank the failures that share words with a description.

The score of the index counts how well the words agree. Three things that it does not see decide
between failures that share most of their words: how much of the description a failure covers, what
the description names (a device, a framework, an op), and which facts stand together
for a failure or against it.
`site/explain/explain.js` ranks in the same way; a test compares the two.
"""

from typing import TYPE_CHECKING, Any

from amp_lab.failures.words import stems_of, terms_of

if TYPE_CHECKING:
    from amp_lab.failures.reference import Reference

# Found with the symptoms: each was searched for in a reference without it.
_COVERAGE = 0.3  # the power of the share of words; 0: the share does not count
_NOT_NAMED = 0.75  # the factor for a failure that says nothing of what the description names
_DESCRIBED = 1.5  # the factor for a failure of which two facts stand together in the description
_THREE_FACTS = 1.75  # the factor for three facts, which are seldom together by chance
_CONTRADICTED = 0.7  # the factor for a failure if facts stand that speak against it
_ABSENT = "!"  # before the words of a fact that the text must not have


def ranked(
    question: str, results: list[dict[str, Any]], reference: "Reference"
) -> list[dict[str, Any]]:
    """The results of the index for a description, best first.

    Args:
        question: The description.
        results: What lunr found: each with ``ref``, the code of a failure, ``score`` and
            ``match_data``.
        reference: The reference with `named`, `described` and `contradicted`.

    Returns:
        The same results in another order; results of equal score by their code.
    """
    terms = set(terms_of(question, reference.synonyms))
    shared = {word for result in results for word in result["match_data"].metadata}
    codes_of_named = [
        set(named["codes"])
        for named in reference.named.values()
        if not terms.isdisjoint(named["words"])
    ]
    stems = stems_of(terms)
    scores = {}
    for result in results:
        code = result["ref"]
        coverage = len(result["match_data"].metadata) / len(shared)
        score = result["score"] * coverage**_COVERAGE
        for codes in codes_of_named:
            if code not in codes:
                score *= _NOT_NAMED
        together = facts_together(code, stems, reference)
        if together > 0:
            score *= _THREE_FACTS if together > 2 else _DESCRIBED
        if any(_stand(facts, stems) for facts in reference.contradicted.get(code, [])):
            score *= _CONTRADICTED
        scores[code] = score
    return sorted(results, key=lambda result: (-round(scores[result["ref"]], 4), result["ref"]))


def is_described(code: str, stems: set[str], reference: "Reference") -> bool:
    """Whether facts that point to the failure stand together in a description with these stems."""
    return facts_together(code, stems, reference) > 0


def facts_together(code: str, stems: set[str], reference: "Reference") -> int:
    """How many facts that point to the failure stand together; 0 if no list is complete."""
    most = 0
    for facts in reference.described.get(code, []):
        if _stand(facts, stems):
            present = [words for words in facts if words[0] != _ABSENT]
            most = max(most, len(present))
    return most


def _stand(facts: list[list[str]], stems: set[str]) -> bool:
    """Whether all facts of a list stand in the text."""
    return all(_stands(words, stems) for words in facts)


def _stands(words: list[str], stems: set[str]) -> bool:
    """Whether the text has one of the words or, after `_ABSENT`, whether it has none of them."""
    if words[0] == _ABSENT:
        return stems.isdisjoint(words[1:])
    return not stems.isdisjoint(words)
