"""What will be refused: no layout by the rules, none that fits, none that ever gets anywhere."""

from __future__ import annotations

from shoal.plan.asked import Asked
from shoal.plan.explain import make_it_fit, no_layout
from shoal.plan.review.finding import Finding, Severity
from shoal.plan.search import Found

# As `shoal plan` exits: a wrong spec, and an environment that it does not fit into.
SPEC, ENVIRONMENT = 2, 78


def by_the_rules(asked: Asked) -> Finding:
    sentence = no_layout(asked)
    what, _, change = sentence.partition("; ")
    if not change:
        what, _, change = sentence.rpartition(": ")
    return _finding(asked, "no-layout", ("mesh", "train.batch"), what, change, SPEC)


def by_memory(asked: Asked, least: Found) -> Finding:
    what, _, change = make_it_fit(asked, least).partition("; ")
    return _finding(asked, "does-not-fit", ("mesh", "data.seq_len"), what, change, ENVIRONMENT)


def _finding(asked: Asked, rule: str, keys: tuple[str, ...], what: str, change: str, code: int) -> Finding:
    return Finding(Severity.REFUSED, rule, keys, _sentence(what), _sentence(change), None, asked.devices, code)


def _sentence(text: str) -> str:
    """A key of the run file stays as it is spelt."""
    begins = text[:1] if "." in text.partition(" ")[0] else text[:1].upper()
    return f"{begins}{text[1:].rstrip('.')}." if text else ""
