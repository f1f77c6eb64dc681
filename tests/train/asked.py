"""A data set of text in bytes, for runs that are asked while they train: tiny.py's has a vocabulary without letters."""

from __future__ import annotations

from pathlib import Path

from shoal.evaluate.generated.catalogue import named
from tests.data.reading import EOS, write_data_set


def make_text(folder: Path) -> Path:
    texts = [f"{item['text']} {item['target']}" for item in named("copy", 5, 80).items]
    documents = [[EOS, *text.encode(), EOS] for text in texts]
    write_data_set(folder, [documents])
    return folder
