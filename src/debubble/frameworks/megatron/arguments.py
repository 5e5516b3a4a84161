"""Typed access to Megatron-LM's arguments, which records the arguments that were read."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from debubble.imports.command_line import args_hint, variables_in
from debubble.imports.kinds import BOOLEAN, as_yaml
from debubble.imports.reader import SettingsReader
from debubble.imports.settings import MISSING_SOURCES
from debubble.ir import InputError

SIMILARITY = 0.9
"""Minimum similarity (difflib's cutoff) of an argument that may be a missing one, misspelt."""

_VALUED = (
    "micro-batch-size", "global-batch-size", "seq-length", "num-layers", "hidden-size", "ffn-hidden-size",
    "num-attention-heads", "num-query-groups", "kv-channels", "vocab-size", "padded-vocab-size",
    "max-position-embeddings", "normalization", "position-embedding-type", "tensor-model-parallel-size",
    "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size",
    "expert-tensor-parallel-size", "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout",
    "recompute-granularity", "recompute-method", "recompute-num-layers", "num-experts", "moe-router-topk",
    "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "moe-layer-freq", "q-lora-rank", "kv-lora-rank",
    "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "mtp-num-layers", "optimizer", "optimizer-offload-fraction",
    "exp-avg-dtype", "exp-avg-sq-dtype", "main-grads-dtype", "main-params-dtype", "data-parallel-sharding-strategy",
    "attention-backend", "fp8-recipe", "moe-token-dispatcher-type", "zero-stage",
)  # fmt: skip
"""Arguments that need a value and affect the prediction, so that `false` and empty values are errors."""


def is_off(name: str, value: Any) -> bool:
    """Tell whether an entry of a YAML file means that the argument of this name is absent."""
    plain = name.lstrip("-").replace("_", "-")
    return value is None or (plain not in _VALUED and (value is False or value in ([], {})))


_OF_MODEL = ("--hidden-size", "--num-attention-heads", "--num-layers")
_YAML = (".yaml", ".yml")
"""Suffixes of files whose entries are not command-line words, and whose switches may be 1 and 0."""


class Arguments(SettingsReader):
    """Arguments, whose values are words that are converted when they are read."""

    @property
    def sources(self) -> str:
        """A hint, for the error on a missing argument, that a missing sourced script may set it."""
        names = " ".join(self.words(MISSING_SOURCES))
        if variables_in(names):
            return f"; it sources {names}: {args_hint(names, {})}, or"
        return f"; it sources {names}, which is not next to it: put it there, or" if names else ";"

    def get(self, name: str, default: Any = None) -> Any:
        """An argument's value; `default` if it is missing or off."""
        value = super().get(name, default)
        return default if value is False else value

    def __contains__(self, name: str) -> bool:
        return self._value(name) not in (None, False)

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether an argument without a value is present; raises InputError if it has a value."""
        value = self._value(name)
        if self.path.suffix in _YAML:
            value = {"1": True, "0": False}.get(str(value), value)
        read = default if value is None else BOOLEAN.parse(value, converts=self.is_converted(name))
        if read is None:
            raise self.refusal(name, f"is {as_yaml(value)}, and takes no value: let it stand alone, or leave it out")
        return read

    def word(self, name: str, default: str | None = None) -> str | None:
        """The value of an argument; raises InputError if it has none."""
        value = self._value(name)
        if value is None or value in ("none", "None"):
            return default
        self.check_has_value(name, value)
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def check_has_value(self, name: str, value: Any) -> None:
        """Raise InputError if an argument has no value, or a boolean or table as its value."""
        if isinstance(value, bool | dict) or value == ():
            is_file = self.path.suffix in _YAML
            shows = as_yaml([] if value == () else value)
            lacks = f"has no value after it: give it with --args '{name} VALUE'"
            raise self.refusal(name, f"is {shows}, and takes a value" if is_file else lacks)

    def words(self, name: str) -> tuple[str, ...]:
        """The words after an argument; a list in one word is split."""
        value = self.get(name, ())
        if isinstance(value, str):
            return tuple(filter(None, value.strip("[]").replace(",", " ").split()))
        items = value if isinstance(value, list | tuple) else () if value is True else (value,)
        return tuple(map(str, items))

    def number(self, name: str, default: int | None = None) -> int:
        """An integer; raises InputError if it is missing without a default, or is another value."""
        word = self.word(name)
        if word is None:
            if default is None:
                near = get_close_matches(
                    name, [argument for argument in self.settings if argument.startswith("--")], 1, cutoff=SIMILARITY
                )
                misspelt = f", but {near[0]}" if near else ""
                if unset := [argument for argument in self.settings if argument.startswith("$")]:
                    misspelt = f", and {unset[0]} is not told"
                model = ", or the model with --model" if name in _OF_MODEL else ""
                raise InputError(
                    f"{self.path} does not say {name}{misspelt}{self.sources} give it with --args, as in"
                    f" --args '{name} N'{model}."
                )
            return default
        return self._integer(name, word)

    def numbers(self, name: str) -> list[int]:
        """The non-negative integers after an argument, empty if it is missing; raises InputError for other values."""
        if (value := self.get(name)) is not None:
            self.check_has_value(name, value)
        return [self._check_minimum(0, name, self._integer(name, word)) for word in self.words(name)]

    def _integer(self, name: str, word: str) -> int:
        try:
            return int(word)
        except ValueError:
            hint = f"which is no whole number that is known here: give it with --args '{name} N'"
            if "$" in word:
                sources = self.sources.removesuffix(" or").replace(";", ":", 1) if self.words(MISSING_SOURCES) else ":"
                variables = f"{args_hint(word, {})}, or" if variables_in(word) else "give it with"
                hint = f"which the file does not tell{sources} {variables} --args '{name} N'"
            raise InputError(f"{self.path}: {name} is '{word}', {hint}.") from None

    def share(self, name: str, default: float = 1.0) -> float:
        """A number between 0 and 1; raises InputError if the argument is another value."""
        word = self.word(name, str(default))
        try:
            share = float(word or "")
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise InputError(f"{self.path}: {name} is '{word}', which is no share between 0 and 1.")
        return share
