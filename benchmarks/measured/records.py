"""Records of measured runs, and the job of each.

`runs/*.toml` has a table of runs per source: `source`, defaults of all its runs, and `runs`, one line each.  A run has
its model (by name, or of `runs/models.toml`), devices, the sequences of a step (`batch`), degrees, what it recomputes
(`recompute_assumed`: the least that fits, where no source says it), its framework (`--framework` of the command line),
and what was measured: `step_seconds`, or `tokens_per_second` of a device, and `memory_gib` of the fullest device,
allocated, `memory_reserved_gib`, or `memory_process_gib`, which is what nvidia-smi shows, with CUDA's context.

Half of the configurations are there to fit costs to, half to test them: a hash of the configuration decides.  It leaves
out what was measured, the number of devices and sequences, and the framework's version, so that the same run at another
scale or release is in the same half.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from published import in_turn

from debubble.costs import Cluster
from debubble.imports.job import ImportedJob, even_layers
from debubble.ir import RunOptions
from debubble.models import Model, models
from debubble.planners.partitioning.by_layers import layers_named

RUNS = Path(__file__).with_name("runs")
MODELS = "models.toml"
SCALE = ("batch", "step_seconds", "tokens_per_second", "memory_gib", "memory_reserved_gib", "memory_process_gib",
         "source", "passes", "recompute_assumed")  # fmt: skip
"""Entries that do not distinguish configurations."""
OPTIONS = (
    "micro_batch_size",
    "tensor",
    "context",
    "expert",
    "expert_tensor",
    "dtype",
    "lora",
    "quantize",
    "optimizer",
    "master_dtype",
)
"""Entries that are options of the run."""

TORCHTITAN_OP = (("norm", "norm+mlp"), ("norm", "norm+activation+multiply"))
"""What even and odd layers recompute where a file says `op`: torchtitan's selective checkpointing keeps the results of
every second product, which is the up-projection or the gate of each MLP, so that half of the layers recompute both."""

RESERVED = 1.06
"""Ratio of reserved to allocated memory of torch (3 to 9% more in SimuMax' and Megatron-Kwai's tables)."""

CONTEXT = {"V100-32GB": 1113 / 1024, "A100-80GB": 1573 / 1024}
"""GiB of CUDA's context as nvidia-smi shows them (BigScience, experiments/tr3m-1B3.md and chronicles-prequel.md)."""

Half = Literal["fit", "test"]


@dataclass(frozen=True)
class Record:
    """A measured run.

    Attributes:
        name: Its file and place there.
        entries: What the file says of it.
    """

    name: str
    entries: Mapping[str, Any]

    @cached_property
    def half(self) -> Half:
        """The half of the record, fit or test, by a hash of its configuration."""
        hashed: dict[str, Any] = {name: entry for name, entry in self.entries.items() if name not in SCALE}
        hashed["framework"] = hashed["framework"].partition("@")[0]
        hashed["cluster"] = self.device
        digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).digest()
        return "test" if digest[0] % 2 else "fit"

    @property
    def devices(self) -> str:
        """The devices, as `8xH100-80GB`."""
        cluster = self.entries["cluster"]
        return str(cluster if isinstance(cluster, str) else cluster["devices"])

    @property
    def device(self) -> str:
        """Type of its devices."""
        return self.devices.rpartition("x")[2]

    @property
    def cluster(self) -> Cluster:
        """Its devices as a cluster."""
        cluster = self.entries["cluster"]
        return Cluster.of(cluster) if isinstance(cluster, str) else Cluster.from_dict(cluster)

    @cached_property
    def model(self) -> Model:
        """Its model; `experts_in_turn`: token t has the experts after those of token t - 1."""
        model = model_named(self.entries["model"])
        return in_turn(model) if self.entries.get("experts_in_turn") else model

    @property
    def seconds(self) -> float | None:
        """Measured seconds per step, or None."""
        if (step_seconds := self.entries.get("step_seconds")) is not None:
            return float(step_seconds)
        if (tokens := self.entries.get("tokens_per_second")) is None:
            return None
        return float(self.entries["batch"] * self.entries["sequence_length"] / tokens / self.cluster.count)

    @property
    def memory(self) -> float | None:
        """Measured GiB allocated on the fullest device, or None."""
        if (reserved := self.entries.get("memory_reserved_gib")) is not None:
            return float(reserved) / RESERVED
        if (process := self.entries.get("memory_process_gib")) is not None:
            return float(process - CONTEXT[self.device]) / RESERVED
        return self.entries.get("memory_gib")

    @property
    def words(self) -> str:
        """Short description of the run."""
        e = self.entries
        degrees = [f"{name} {e[name]}" for name in ("tensor", "pipeline", "chunks", "context", "expert") if name in e]
        size = f"{e.get('micro_batch_size', 1)} x {e['sequence_length']}"
        rest = [e.get("dtype", "bf16"), *degrees, size, *([e["recompute"]] if "recompute" in e else [])]
        return f"{e['model']} on {self.devices}, {', '.join(rest)} ({e['framework']})"

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.entries.get("pipeline", 1) * self.entries.get("chunks", 1))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers per stage."""
        layers = self.entries.get("layers")
        if layers is None:
            return even_layers(self.model.layers, self.stages)
        return layers_named(layers) if isinstance(layers, str) else tuple(layers)

    @property
    def options(self) -> RunOptions:
        """How the model is run."""
        e = self.entries
        ranks = e.get("tensor", 1) * e.get("context", 1) * e.get("pipeline", 1)
        data = self.cluster.count // ranks
        divided = data * e.get("context", 1) > 1
        zero = e.get("zero", 1)
        if zero == 3 and "pipeline" in e:
            zero = 1  # parameters stay gathered during a step, and gradients are summed once
        return RunOptions(
            sequence_length=e["sequence_length"], data=data, zero=zero if divided else 0,
            framework=e["framework"], **{name: e[name] for name in OPTIONS if name in e},
        )  # fmt: skip

    @property
    def job(self) -> ImportedJob:
        """The job, as if it had been imported from a configuration file."""
        e, options = self.entries, self.options
        return ImportedJob(
            target="megatron", model=self.model, options=options, pipeline=e.get("pipeline", 1),
            micro_batches=e["batch"] // (options.data * options.micro_batch_size), layers=self.layers,
            order="interleaved" if e.get("chunks", 1) > 1 else "1f1b", strategies=self._strategies,
            passes=e.get("passes", 1),
        )  # fmt: skip

    @property
    def _strategies(self) -> dict[int, tuple[str, str]]:
        """Recomputation of each layer."""
        layers = self.model.layers
        recompute = self.entries.get("recompute", self.entries.get("recompute_assumed"))
        if recompute is None:
            return {}
        if recompute == "alternate":
            return dict.fromkeys(range(0, layers, 2), ("full", "full"))
        if recompute == "op":
            return {layer: TORCHTITAN_OP[layer % 2] for layer in range(layers)}
        return dict.fromkeys(range(self.entries.get("recompute_layers", layers)), (recompute, recompute))


def model_named(name: str) -> Model:
    """A model of `runs/models.toml`, or one that debubble knows by name."""
    described = tomllib.loads((RUNS / MODELS).read_text())
    if name not in described:
        return models[name]
    entry = dict(described[name])
    base = models[entry.pop("of")].config if "of" in entry else {}
    return Model.from_hf({**base, **entry})


def records() -> Iterator[Record]:
    """All records."""
    for path in sorted(RUNS.glob("*.toml")):
        if path.name == MODELS:
            continue
        table = tomllib.loads(path.read_text())
        runs = table.pop("runs")
        for place, run in enumerate(runs):
            yield Record(f"{path.stem}/{place:02}", {**table, **run})
