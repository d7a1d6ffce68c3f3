"""What `tinsmith serve` is asked to run, checked once and handed to every actor."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tinsmith.bus.protocol.envelope import Name


class ServiceOptions(BaseModel):
    """One service: a base model, its ranks and samplers, and the bus that they serve."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_path: str
    alias: Name
    """The name by which clients ask for the base model."""
    state_dir: str
    """Absolute folder for snapshots, checkpoints and published versions; shared by all nodes of a cluster."""
    bus_url: str
    bus: str = "tinsmith"
    ranks: int = Field(default=2, ge=1)
    samplers: int = Field(default=1, ge=0)
    token_budget: int = Field(default=4096, ge=1)
    """Padded tokens a micro-batch."""
    sampler_rows: int = Field(default=64, ge=1)
    """Sequences that one sampler generates at once."""
    sampler_threads: int = Field(default=1, ge=1)
    max_pending_samples: int = Field(default=2048, ge=1)
    """Sampling commands taken from the bus at once; the rest wait there."""
    gradient_checkpointing: bool = False
    keep_gathered_mib: int = Field(default=1024, ge=0)
    """A base of at most so many MiB stays whole on each rank under adapters, instead of being gathered at each pass."""
    losses: tuple[str, ...] = ()
    """Modules whose `register(registry)` adds losses."""
    metrics: tuple[str, ...] = ()
    """TOML overlays over the metric catalogue."""
    lease_ms: int = Field(default=5000, ge=200)
    snapshot_steps: int = Field(default=50, ge=1)
    """A snapshot of a model every so many optimizer steps ..."""
    snapshot_bytes: int = Field(default=64 * 2**20, ge=1)
    """... or when its redo log holds this many bytes of bodies."""
    step_deadline: float = Field(default=600.0, gt=0)
    """Seconds after which a step that has not ended counts as hung."""
    max_attempts: int = Field(default=3, ge=1)
    """A command that lost its ranks this often is given up."""

    @property
    def service(self) -> str:
        """Ray namespace of this service's actors."""
        return f"tinsmith-{self.bus}"

    def version_dir(self, version: str) -> Path:
        """Folder of a published version `model/name`."""
        return Path(self.state_dir) / "published" / version

    def checkpoint_dir(self, checkpoint: str) -> Path:
        """Folder of a user's checkpoint `model/name`."""
        return Path(self.state_dir) / "checkpoints" / checkpoint

    def snapshot_dir(self, model: str, seq: int) -> Path:
        """Folder of the automatic snapshot of a model after command `seq`."""
        return Path(self.state_dir) / "snapshots" / model / str(seq)
