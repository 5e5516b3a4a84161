"""Searches the site for every word of the glossary: `make docs`, or `python docs/check_search.py FOLDER`.

It reads the index as the site's own script does: a page is found if its text or titles have every word, by its stem.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

GLOSSARY = Path(__file__).parent / "reference.md"


def terms() -> list[str]:
    """Words that the glossary explains."""
    return re.findall(r"^(\S.*)\n: ", GLOSSARY.read_text(), re.MULTILINE)


def index_of(site: Path) -> dict[str, Any]:
    """Index that the site's script loads."""
    text = (site / "searchindex.js").read_text()
    index: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return index


def matching_pages(index: dict[str, Any], query: str) -> set[str]:
    """Pages that a search returns."""
    language = SearchEnglish({})
    words = [word for word in language.split(query.lower()) if language.word_filter(word)]
    pages: set[int] | None = None
    for word in words:
        stem = language.stem(word)
        with_word: set[int] = set()
        for entries in (index["terms"], index["titleterms"]):
            there = entries.get(stem, [])
            with_word.update([there] if isinstance(there, int) else there)
        pages = with_word if pages is None else pages & with_word
    return {index["docnames"][page] for page in pages or ()}


def main(site: Path) -> int:
    """Search every word; returns the exit code."""
    index = index_of(site)
    missing = [term for term in terms() if GLOSSARY.stem not in matching_pages(index, term)]
    for term in missing:
        print(f"A search for '{term}' does not find its page.")
    if missing:
        return 1
    print(f"A search for each of {len(terms())} words of the glossary finds its page.")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
