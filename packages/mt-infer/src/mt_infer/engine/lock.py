"""The lock of an engine's callers, which take turns."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A reentrant lock that threads acquire in the order of their requests.

    A thread that releases `threading.RLock` and acquires it again gets it before waiting threads.
    This lock is handed to the thread with the longest wait, so a caller waits for at most one step
    of each other caller.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # protects the fields below, for a moment
        self._owner, self._depth = 0, 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock, and return whether this thread has it.

        Args:
            blocking: Whether to wait for it.
        """
        me = threading.get_ident()
        with self._guard:
            if not self._depth or self._owner == me:
                self._owner, self._depth = me, self._depth + 1
                return True
            if not blocking:
                return False
            turn = threading.Lock()
            turn.acquire()
            own = me, turn
            self._waiting.append(own)
        try:
            turn.acquire()  # until the owner hands the lock over
        except BaseException:  # a signal
            with self._guard:
                was_waiting = own in self._waiting
                if was_waiting:
                    self._waiting.remove(own)
            if not was_waiting:
                self.release()
            raise
        return True

    def release(self) -> None:
        """Undo one `acquire`; after the last one the lock goes to the thread with the longest wait.

        Raises:
            RuntimeError: This thread does not have the lock.
        """
        with self._guard:
            if not self._depth or self._owner != threading.get_ident():
                raise RuntimeError("this thread does not have the lock; acquire() it first")
            self._depth -= 1
            if not self._depth and self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
