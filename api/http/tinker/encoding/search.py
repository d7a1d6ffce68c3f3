"""A search over sessions as RestClient sends it, which sessions it finds, and how each is shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from tinsmith.api.http.tenancy.records import FinishRecord, SessionRecord
from tinsmith.bus.protocol.errors import InvalidInput


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Owner(_Part):
    """Whose sessions; whatever is asked, a tenant finds its own alone."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: tuple[str, ...] = ()


class Status(_Part):
    """No session is ever cancelled or failed as a whole here, so those two find none."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: tuple[Literal["success", "errored", "interrupted"], ...] | None = None


class Cursor(_Part):
    """The last session of the page before."""

    last_created_at: AwareDatetime
    last_session_id: str


class Search(_Part):
    """All that is given must hold, save that `session_id` and `display_name` are alternatives."""

    session_id: str | None = None
    project_ids: tuple[str, ...] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = Field(default=None, min_length=1)
    owner: Owner = Owner()
    statuses: tuple[Status, ...] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: Cursor | None = None


@dataclass(frozen=True)
class Found:
    """One session of the store."""

    session: str
    record: SessionRecord
    finish: FinishRecord | None
    living: bool

    @property
    def created(self) -> datetime:
        """In UTC, to the microsecond, as it is shown."""
        return datetime.fromtimestamp(self.record.created, UTC)

    @property
    def status(self) -> dict[str, Any] | None:
        """A SessionStatus; None when its client neither said good-bye nor is heard of."""
        if self.finish is not None:
            reason = {"type": self.finish.reason}
            return {"type": "client_finished", "reason": reason, "detail": self.finish.detail}
        return {"type": "active"} if self.living else None

    @property
    def metadata(self) -> dict[str, str] | None:
        """As clients read it: every value as text."""
        return as_text(self.record.user_metadata)


def as_text(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata with every value as text; None where there is none."""
    return {key: str(value) for key, value in (metadata or {}).items()} or None


def read_search(body: Mapping[str, Any]) -> Search:
    """Raises InvalidInput that names the field."""
    try:
        return Search.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(f"{first['msg']} (got {first['input']!r})"[:300], field=where) from None


def page(search: Search, owner: str, sessions: Sequence[Found]) -> tuple[list[Found], dict[str, str] | None]:
    """What a tenant's search finds, newest first, and the cursor of the next page; None when there is none."""
    found = [one for one in sessions if one.record.owner == owner and _matches(search, owner, one)]
    found.sort(key=_place, reverse=True)
    if search.cursor is not None:
        last = search.cursor.last_created_at.astimezone(UTC), search.cursor.last_session_id
        found = [one for one in found if _place(one) < last]
    shown = found[: search.limit]
    if len(found) <= search.limit:
        return shown, None
    return shown, {"last_created_at": shown[-1].created.isoformat(), "last_session_id": shown[-1].session}


def _place(one: Found) -> tuple[datetime, str]:
    return one.created, one.session


def _matches(search: Search, owner: str, one: Found) -> bool:
    metadata = one.metadata or {}
    return (
        _is_named(search, one)
        and (search.owner.type != "user" or owner in search.owner.owner_urns)
        and (search.project_ids is None or one.record.project in search.project_ids)
        and all(metadata.get(key) == value for key, value in search.user_metadata.items())
        and (search.statuses is None or any(_has_status(one, status) for status in search.statuses))
    )


def _is_named(search: Search, one: Found) -> bool:
    if search.session_id is None and search.display_name is None:
        return True
    if search.session_id == one.session:
        return True
    name = (one.record.display_name or "").lower()
    return search.display_name is not None and all(word in name for word in search.display_name.lower().split())


def _has_status(one: Found, asked: Status) -> bool:
    status = one.status
    if status is None or status["type"] != asked.type:
        return False
    return one.finish is None or asked.reasons is None or one.finish.reason in asked.reasons
