"""Groups of ranks and sampler replicas as Ray actors: placed, named, detached, watched and taken down.

Ranks and samplers are detached, so that they outlive a coordinator that dies; they are named within the service's
namespace, so that the next coordinator finds them.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle

from tinsmith.actors.sampling.replica import SamplerReplica
from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.workers.rank import Body, TrainerRank
from tinsmith.actors.workers.step import RankReply, Step
from tinsmith.bus.protocol.errors import RanksLost, StartupError, TinsmithError

CPU_SHARE = 0.1
"""What each actor reserves: the ranks of one machine share its cores, so that no cluster is too small for a laptop."""


def _gpus_per_rank() -> float:
    """One GPU a rank where the cluster has any."""
    return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0


@dataclass
class Group:
    """The ranks of one trainer, all alive, holding one base model."""

    ranks: list[ActorHandle]
    facts: dict[str, Any] = field(default_factory=dict)

    def send(self, step: Step, body: Body = b"") -> list[Any]:
        """Queue the step on every rank; returns one reference a rank. A large body is put once for all."""
        shared: Any = ray.put(body) if len(body) > 65536 else body
        # Packed once for all ranks, and by plain pickle: Ray's own way costs ten times as much for each rank.
        packed = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
        return [rank.execute.remote(packed, shared) for rank in self.ranks]

    async def replies(self, references: list[Any], deadline: float) -> list[RankReply]:
        """Every rank's reply. Raises RanksLost when a rank died, failed or did not answer in `deadline` seconds."""
        return [pickle.loads(reply) for reply in await self._wait(references, deadline)]

    async def _wait(self, references: list[Any], deadline: float) -> list[Any]:
        try:
            return list(await asyncio.wait_for(asyncio.gather(*references), deadline))
        except TimeoutError:
            raise RanksLost(f"a step did not end within {deadline:g} s", remedy="The group is rebuilt.") from None
        except ray.exceptions.RayError as error:
            raise RanksLost(f"a rank failed: {error}", remedy="The group is rebuilt.") from error

    async def positions(self, deadline: float) -> list[dict[str, tuple[str, int, int]]]:
        """What each rank says of its models, once it is done with the steps that it was sent. Raises RanksLost."""
        return await self._ask("positions", deadline=deadline)

    async def _ask(self, method: str, *args: Any, deadline: float = 60.0) -> list[Any]:
        references = [getattr(rank, method).remote(*args) for rank in self.ranks]
        return await self._wait(references, deadline)


def _rank_name(rank: int) -> str:
    return f"rank-{rank}"


async def find_group(options: ServiceOptions) -> Group | None:
    """The group that an earlier coordinator left, if every rank of it answers."""
    try:
        ranks = [ray.get_actor(_rank_name(rank), namespace=options.service) for rank in range(options.ranks)]
    except ValueError:
        return None
    group = Group(ranks)
    try:
        facts = await group._ask("describe")
    except RanksLost:
        return None
    if any(fact is None for fact in facts):
        return None
    group.facts = _group_facts(facts)
    return group


async def build_group(options: ServiceOptions) -> Group:
    """Fresh ranks that have met, loaded and sharded the base. Raises NotAModel, StartupError or RanksLost."""
    await destroy_group(options)
    actor = ray.remote(TrainerRank)
    ranks = [
        actor.options(
            name=_rank_name(rank),
            namespace=options.service,
            lifetime="detached",
            num_cpus=CPU_SHARE,
            num_gpus=_gpus_per_rank(),
            max_restarts=0,
            max_task_retries=0,
        ).remote(options, rank, options.ranks)
        for rank in range(options.ranks)
    ]
    group = Group(ranks)
    try:
        addresses = await group._ask("address")
        host, port = addresses[0]
        one_node = len({address for address, _ in addresses}) == 1
        facts = await group._ask(
            "join", "127.0.0.1" if one_node else host, port, one_node, deadline=options.step_deadline
        )
    except RanksLost as lost:
        await destroy_group(options)
        raise _startup_cause(lost) from lost
    group.facts = _group_facts(facts)
    return group


def _group_facts(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's facts, with the process of each rank."""
    return {**facts[0], "ranks": len(facts), "pids": [fact["pid"] for fact in facts]}


def _startup_cause(lost: RanksLost) -> TinsmithError:
    """The typed error inside a rank's failure to start; the failure itself when it is of another kind."""
    cause = lost.__cause__
    inner = getattr(cause, "cause", None)
    if isinstance(inner, TinsmithError):
        return inner
    return lost


async def destroy_group(options: ServiceOptions) -> None:
    """Kill every rank of this service that exists, and wait until their names are free."""
    for rank in range(options.ranks):
        await _kill(_rank_name(rank), options.service)


@dataclass(frozen=True)
class Replica:
    """A sampler that has loaded the base, and its process."""

    actor: ActorHandle
    pid: int


async def build_samplers(options: ServiceOptions, numbers: Iterable[int]) -> list[Replica]:
    """Fresh sampler replicas of these numbers with the base loaded. Raises NotAModel or StartupError."""
    actor = ray.remote(SamplerReplica)
    replicas = []
    for number in numbers:
        await _kill(f"sampler-{number}", options.service)
        replicas.append(
            actor.options(
                name=f"sampler-{number}",
                namespace=options.service,
                lifetime="detached",
                num_cpus=CPU_SHARE,
                num_gpus=_gpus_per_rank(),
                max_concurrency=options.max_pending_samples + 8,
            ).remote(options)
        )
    try:
        loaded = await asyncio.gather(*[replica.load.remote() for replica in replicas])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TinsmithError):
            raise error.cause from error
        raise StartupError(f"a sampler could not start: {error}") from error
    return [Replica(actor, facts["pid"]) for actor, facts in zip(replicas, loaded, strict=True)]


async def destroy_samplers(options: ServiceOptions) -> None:
    """Kill every sampler of this service."""
    for number in range(options.samplers):
        await _kill(f"sampler-{number}", options.service)


async def _kill(name: str, namespace: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
    except ValueError:
        return
    while True:
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            return
        await asyncio.sleep(0.02)
