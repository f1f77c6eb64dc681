"""The last word of a passage of Moby-Dick, which stood in the passage before: a model that reads it all can know it.

As in LAMBADA. The text is examples/text/moby-dick.txt, whose author died in 1891; `scripts/make_cloze.py` makes the
items. Of a model that was trained on the book they say what it remembers: `shoal eval --contamination` tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shoal.evaluate.generated.told import Told

LEAST_LETTERS, LEAST, MOST = 5, 200, 640  # letters of the word, and of the passage
_CHAPTER = re.compile(r"^CHAPTER (\d+)\. ")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+")
_LAST = re.compile(r"^(.*[a-z,;]) ([a-z]+)[.!?;]$")
_EVERYWHERE = {"about", "after", "again", "could", "other", "shall", "should"}
_EVERYWHERE |= {"their", "there", "these", "thing", "things", "those", "though"}

CLOZE = Told(
    1,
    "the last word of a passage of Moby-Dick, which is in the passage",
    "cloze.jsonl",
    "chapter",
    {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": " {{target}}",  # of this kind nothing else stands between
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    },
)


def passages(book: str, each: int) -> Iterator[dict[str, Any]]:
    """At most so many a chapter, the first that will do, none of them overlapping."""
    chapter, found = "", 0
    for line in book.splitlines():
        if head := _CHAPTER.match(line):
            chapter, found = head[1], 0
        elif chapter:
            for item in _of_paragraph(line):
                if found < each:
                    found += 1
                    yield {"id": f"{chapter}.{found}", "chapter": chapter, **item}


def _of_paragraph(paragraph: str) -> Iterator[dict[str, str]]:
    """Sentences, or their parts, from wherever they fit, the next passage after the end of the one before."""
    sentences = _SENTENCE.split(" ".join(paragraph.split()))
    free = 0
    for end in range(1, len(sentences) + 1):
        for begin in range(end - 1, free - 1, -1):
            item = _passage(" ".join(sentences[begin:end]))
            if item is not None:
                free = end
                yield item
                break


def _passage(text: str) -> dict[str, str] | None:
    last = _LAST.match(text) if LEAST <= len(text) <= MOST else None
    if last is None or len(last[2]) < LEAST_LETTERS or last[2] in _EVERYWHERE:
        return None
    before = re.findall(r"[a-z]+", last[1].lower())
    return {"text": last[1], "target": last[2]} if last[2] in before[:-4] else None
