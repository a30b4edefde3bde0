"""What people do with assistants, and who may do it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.assistants.costs import Costs, PrefixCost
from app.assistants.limits import MAX_ASSISTANTS, MAX_NAME
from app.assistants.shared_text import AssistantPrefixes
from app.faults import Fault, InvalidField, NoSuchPage
from sessions.assistant_records import AssistantDetail, AssistantDraft
from sessions.repository import Repository

COPY = " (copy)"


class NotYours(Fault):
    """The assistant can be seen and used, but only its owner or an operator may change it."""


class PrefixTooLong(InvalidField):
    """Prompt and documents fill more than half of the context."""

    def __init__(self, cost: PrefixCost) -> None:
        super().__init__(
            "system_prompt",
            f"System prompt and documents have {cost.tokens:,} tokens; at most {cost.limit:,} may "
            f"be shared, half of the model's context of {cost.context:,}. Nothing was saved: "
            "shorten them.",
        )
        self.cost = cost


@dataclass(frozen=True, kw_only=True)
class Rights:
    """What a user may do with an assistant that they see."""

    edit: bool
    publish: bool


def rights(found: AssistantDetail, user_id: str | None, *, operator: bool) -> Rights:
    """Built-in ones nobody changes; published ones only operators, private ones their owner."""
    own = user_id is not None and found.owner_id == user_id
    changeable = found.slug is None
    return Rights(
        edit=changeable and (operator if found.published else own),
        publish=changeable and operator and (own or found.published),
    )


class AssistantService:
    """Stateless but for what it was given. Event loop only."""

    def __init__(
        self, *, repository: Repository, prefixes: AssistantPrefixes, costs: Costs
    ) -> None:
        self.costs = costs
        self._repository = repository
        self._prefixes = prefixes

    async def find(self, user_id: str | None, assistant_id: str) -> AssistantDetail:
        """Raises NoSuchPage when this user sees no such assistant."""
        found = await self._repository.assistant(user_id, assistant_id)
        if found is None:
            raise NoSuchPage
        return found

    async def cost(self, draft: AssistantDraft) -> PrefixCost:
        """Of the shared text, with the template around it."""
        ids = await self._prefixes.ids(draft.system_prompt, draft.documents)
        return await self.costs.of(len(ids))

    async def create(self, user_id: str, draft: AssistantDraft) -> str:
        """A private assistant; returns its id. Raises InvalidField."""
        await self._check_cost(draft)
        await self._check_number(user_id)
        return await self._repository.create_assistant(user_id, draft)

    async def save(
        self,
        user_id: str | None,
        assistant_id: str,
        revision: int,
        draft: AssistantDraft,
        *,
        operator: bool,
    ) -> int:
        """Change an assistant as it was at this revision; its version's number afterwards.

        Raises NoSuchPage, NotYours, InvalidField, and AssistantChanged when it has changed since.
        """
        await self._own(user_id, assistant_id, operator=operator)
        await self._check_cost(draft)
        return await self._repository.save_assistant(assistant_id, revision, draft)

    async def duplicate(self, user_id: str, assistant_id: str) -> str:
        """A private copy of an assistant that the user sees. Raises NoSuchPage, InvalidField."""
        found = await self.find(user_id, assistant_id)
        await self._check_number(user_id)
        name = found.name[: MAX_NAME - len(COPY)] + COPY
        return await self._repository.create_assistant(user_id, replace(found.draft, name=name))

    async def publish(self, user_id: str | None, assistant_id: str, published: bool) -> None:
        """For operators. Raises NoSuchPage, and NotYours for a built-in one."""
        found = await self.find(user_id, assistant_id)
        if not rights(found, user_id, operator=True).publish:
            raise NotYours("Assistants that the program ships are always published.")
        await self._repository.publish_assistant(assistant_id, published)

    async def delete(self, user_id: str | None, assistant_id: str, *, operator: bool) -> None:
        """Chats that were begun with it go on. Raises NoSuchPage, NotYours."""
        await self._own(user_id, assistant_id, operator=operator)
        await self._repository.delete_assistant(assistant_id)

    async def _own(
        self, user_id: str | None, assistant_id: str, *, operator: bool
    ) -> AssistantDetail:
        found = await self.find(user_id, assistant_id)
        if rights(found, user_id, operator=operator).edit:
            return found
        if found.slug is not None:
            raise NotYours("This assistant comes with the program and cannot be changed; copy it.")
        raise NotYours("This assistant is published: only an operator can change it. Copy it.")

    async def _check_cost(self, draft: AssistantDraft) -> None:
        cost = await self.cost(draft)
        if cost.too_long:
            raise PrefixTooLong(cost)

    async def _check_number(self, user_id: str) -> None:
        count = await self._repository.own_assistants(user_id)
        if count >= MAX_ASSISTANTS:
            raise InvalidField(
                "name", f"You have {count} assistants, the most of one user: delete one first."
            )
