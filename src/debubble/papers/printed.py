"""Reader of `paper.toml`, the file of a paper's printed numbers and of the sentences of its claims and tables.

The file has four kinds of entries:

* `[printed]`: figures of the paper that the computation needs, such as the cells of a table or the bars of a figure;
* `[claim.PLACE.KEY]`: a claim, with its statement, the paper's figures as printed, their unit, and why ours differ;
  `kind` says where the figures come from if not the default of `PrintedPaper.claim`, `mended` that the paper
  contradicts itself, and `inputs` which cells were chosen to equal the paper's;
* `[table.KEY]`: title, columns, basis and note of a table;
* `[texts]`: sentences that several of them share.

Sentences are templates in the format of `str.format`, filled with the texts and with words that the computation passes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from debubble.papers.claims import Claim, Kind, compared, stated, unavailable
from debubble.papers.registry import Table


@dataclass(frozen=True)
class PrintedPaper:
    """The entries of a paper's `paper.toml`."""

    printed: Mapping[str, Any]
    claims: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, Mapping[str, Any]]
    texts: Mapping[str, str]

    @staticmethod
    @cache
    def load(name: str) -> PrintedPaper:
        """Read the entries of the paper in the folder of this name."""
        content = tomllib.loads(files("debubble.papers").joinpath(name, "paper.toml").read_text(encoding="utf-8"))
        claims = {f"{place}.{key}": entry for place, keys in content["claim"].items() for key, entry in keys.items()}
        return PrintedPaper(content.get("printed", {}), claims, content["table"], content.get("texts", {}))

    def claim(
        self,
        key: str,
        ours: bool | str | Sequence[float | None] | None = None,
        *,
        printed: str | Sequence[str] | None = None,
        because: str | None = None,
        kind: Kind | None = None,
        inputs: Sequence[int] | None = None,
        **words: object,
    ) -> Claim:
        """Compare a claim of the paper with our result; arguments other than `ours` override the file's values.

        Args:
            key: The claim, as `PLACE.KEY`.
            ours: Whether the statement holds, our text, or our figures; None: debubble computes nothing.
            printed: The paper's figures, if they are derived by computation: one per figure of ours, or one for all.
            because: The reason if ours differ.
            kind: Where the figures come from.
            inputs: Indices of the cells that were chosen to equal the paper's.
            words: Values of the templates' fields.
        """
        entry, filled = self.claims[key], {**self.texts, **words}
        statement = str(entry["statement"]).format(**filled)
        reason = str(entry.get("because", "") if because is None else because).format(**filled)
        paper: Any = entry.get("paper", "") if printed is None else printed
        usual: Kind = "qualitative" if ours is None or isinstance(ours, bool) else "derived" if printed else "printed"
        chosen, mended = kind or entry.get("kind", usual), entry.get("mended", False)
        if ours is None:
            return unavailable(statement, paper=paper, because=reason, kind=chosen)
        if isinstance(ours, bool):
            ours, paper = "yes" if ours else "no", "yes"
        if isinstance(ours, str):
            return stated(statement, paper=paper, ours=ours, because=reason, kind=chosen, mended=mended)
        return compared(
            statement,
            paper=paper * len(ours) if len(paper) == 1 else paper,
            ours=ours,
            unit=entry.get("unit", ""),
            because=reason,
            kind=chosen,
            mended=mended,
            inputs=entry.get("inputs", ()) if inputs is None else inputs,
        )

    def table(self, key: str, rows: Sequence[tuple[Any, ...]], *, basis: str | None = None, **words: object) -> Table:
        """A table with the file's title, columns, basis and note; `words` are the fields of title and note."""
        entry, filled = self.tables[key], {**self.texts, **words}
        return Table(
            title=entry["title"].format(**filled),
            columns=tuple(entry["columns"]),
            rows=tuple(rows),
            basis=basis or entry["basis"],
            note=entry.get("note", "").format(**filled),
            keys=entry.get("keys", 1),
        )
