"""A form that is sent twice does its work once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

KEPT = 4096


class Submissions:
    """Remembers what the latest forms led to, by user and the form's own id. Event loop only."""

    def __init__(self) -> None:
        self._results: OrderedDict[tuple[str, str], asyncio.Future[str]] = OrderedDict()

    async def once(self, user_id: str, submission: str, work: Callable[[], Awaitable[str]]) -> str:
        """The result of `work`, or that of the same form before; a failure may be tried again."""
        key = (user_id, submission)
        if not submission:
            return await work()
        known = self._results.get(key)
        if known is not None:
            return await asyncio.shield(known)
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._results[key] = result
        while len(self._results) > KEPT:
            self._results.popitem(last=False)
        try:
            value = await work()
        except BaseException as error:
            self._results.pop(key, None)
            result.set_exception(error if isinstance(error, Exception) else RuntimeError("ended"))
            result.exception()  # seen here: maybe nobody else waits
            raise
        result.set_result(value)
        return value
