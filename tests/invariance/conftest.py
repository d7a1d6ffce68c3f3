"""Groups of ranks for the session, tiny models on disk, and how long hypothesis looks.

TINSMITH_DEEP=1 (`make test-deep`) looks at thousands of examples, otherwise at a dozen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine.tiny import tiny_model as make_model
from hypothesis import HealthCheck, Phase, settings
from invariance.groups import RankGroup

_SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
# Shrinking takes minutes: the fast profile prints the failing example as it was found.
_QUICK = (Phase.explicit, Phase.generate)
settings.register_profile("fast", max_examples=12, derandomize=True, phases=_QUICK, **_SLOW)
settings.register_profile("deep", max_examples=1200, **_SLOW)
settings.load_profile("deep" if os.environ.get("TINSMITH_DEEP") else "fast")


@pytest.fixture(scope="session")
def group_of() -> Iterator[Callable[[int], RankGroup]]:
    """Number of ranks -> their group; one group of each size a session."""
    groups: dict[int, RankGroup] = {}

    def get(world: int) -> RankGroup:
        return groups.setdefault(world, RankGroup(world))

    yield get
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a tiny random model (see engine.tiny); `-tied` has its head tied to the embedding."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            name, _, tied = kind.partition("-")
            made[kind] = make_model(tmp_path_factory.mktemp(kind), name, tie_word_embeddings=tied == "tied")
        return made[kind]

    return get
