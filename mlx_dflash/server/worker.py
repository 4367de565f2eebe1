"""The one thread that generates: requests go in through a queue, and what becomes of each comes back through its own.

Arrays of MLX belong to the thread that made them, so this thread also loads and unloads. Knows threads and failures;
knows nothing of HTTP, and of a generator only that it loads, answers and unloads.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import Queue
from typing import Any

from .errors import ApiError, ClientGone
from .metrics import Metrics


class Job:
    """One request on its way through the thread.

    request: what is asked for. is_closed: says whether the client closed its connection; the thread asks it.
    """

    def __init__(self, request: Any, is_closed: Callable[[], bool]):
        self.request, self._is_closed = request, is_closed
        self._events: Queue = Queue()
        self._is_given_up = False

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._is_given_up or self._is_closed()

    def give_up(self) -> None:
        """Say that nobody waits for the answer any more."""
        self._is_given_up = True

    def end(self, error: Exception) -> None:
        """Let the job fail, whatever it is waiting for or doing."""
        self.tell(error)
        self.give_up()

    def tell(self, event: Any) -> None:
        """Pass an event on to events(): None is the last one, and an exception is raised there."""
        self._events.put(event)

    def events(self) -> Iterator[Any]:
        """Yield the events that the thread tells, as they come. Raises the exception that the job failed with."""
        while (event := self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


class Worker:
    """The thread, and the queue of jobs that wait for it.

    generator: has load(), answer(job) and unload(), which run in the thread. max_queue: most jobs that wait while
    another one is answered.
    """

    def __init__(self, generator: Any, metrics: Metrics, max_queue: int):
        self.generator, self.metrics, self._max_queue = generator, metrics, max_queue
        self._jobs: Queue[Job | None] = Queue()
        self._admitted: set[Job] = set()
        self._lock = threading.Lock()  # of _admitted and _is_open
        self._is_open = True
        self._current: Job | None = None  # the one that is being answered
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Start the thread and wait until the pair is loaded. Raises what the loading raised."""
        self._thread.start()
        try:
            self._loaded.result()
        except BaseException:
            self.stop_and_join()
            raise

    def stop_and_join(self, grace: float | None = None) -> None:
        """End the thread after the answer that it is writing; jobs that wait fail with status 503.

        grace: seconds for which the answer may go on; after them it fails with status 503, too. None: no limit.
        """
        with self._lock:
            self._is_open = False
            waiting = self._admitted - {self._current}
        for job in waiting:
            job.end(_unavailable())
        self._jobs.put(None)
        try:
            self._thread.join(grace)
        finally:
            # Also if a second Ctrl-C interrupts the wait.
            if self._thread.is_alive() and (job := self._current) is not None:
                job.end(ApiError(503, "the server stopped before the answer was complete", code="unavailable"))
            self._thread.join()

    @property
    def is_healthy(self) -> bool:
        """Whether jobs are accepted."""
        return self._is_open and self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Jobs that wait or are being answered, without those of clients that left."""
        with self._lock:
            return self._count_waiting()

    def _count_waiting(self) -> int:
        return sum(not job.is_gone for job in self._admitted)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ApiError when too many wait, or when the thread has ended."""
        with self._lock:
            if not self._is_open:
                raise _unavailable()
            if self._count_waiting() > self._max_queue:
                message = f"{self._max_queue} requests are waiting already; try again later"
                raise ApiError(429, message, code="queue_full")
            self._admitted.add(job)
        self._jobs.put(job)

    def _run(self) -> None:
        try:
            if not attempt(self.generator.load, self._loaded.set_exception):
                return
            self._loaded.set_result(None)
            while (job := self._jobs.get()) is not None and self._is_open:
                self._current = job
                attempt(partial(self.generator.answer, job), partial(self._fail, job))
                with self._lock:
                    self._admitted.discard(job)
                    self._current = None
        finally:
            self._close()
            self.generator.unload()

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job with the error that its client is to see."""
        if isinstance(error, ClientGone):
            self.metrics.add("clients_gone_total")
        elif not isinstance(error, (ApiError, ValueError)):
            logging.error("an answer failed", exc_info=error)
            error = ApiError(500, f"the answer failed: {type(error).__name__}: {error}")
        job.tell(error)

    def _close(self) -> None:
        """Accept no more jobs, and end those that nobody will answer."""
        with self._lock:
            self._is_open = False
            left = list(self._admitted)
            self._admitted.clear()
        for job in left:
            job.tell(_unavailable())


def attempt(work: Callable[[], None], fail: Callable[[Exception], None]) -> bool:
    """Do the work, or hand what it raised to fail; return whether it was done.

    For threads that serve somebody: whatever goes wrong with one request ends that request, and nothing else.
    """
    try:
        work()
    except Exception as error:
        fail(error)
        return False
    return True


def _unavailable() -> ApiError:
    return ApiError(503, "the server cannot generate any more; see its log", code="unavailable")
