"""The server's thread: a request that fails ends alone, and nobody waits for an answer that will not come."""

import threading

import pytest
from support.server_fixtures import wait_until

from mlx_dflash.server.errors import ApiError, ClientGone
from mlx_dflash.server.metrics import Metrics
from mlx_dflash.server.worker import Job, Worker


class Stub:
    """Answers a job with its request, which may be an exception; notes the threads that it ran in."""

    def __init__(self, load_error=None):
        self._load_error, self.threads, self.may_answer = load_error, [], threading.Event()
        self.is_answering = threading.Event()
        self.may_answer.set()

    def load(self):
        self.threads.append(threading.current_thread())
        if self._load_error is not None:
            raise self._load_error

    def answer(self, job):
        self.threads.append(threading.current_thread())
        self.is_answering.set()
        assert self.may_answer.wait(30)
        if isinstance(job.request, Exception):
            raise job.request
        job.tell(job.request)
        job.tell(None)

    def unload(self):
        self.threads.append(threading.current_thread())


@pytest.fixture
def worker():
    worker = Worker(Stub(), Metrics(), max_queue=2)
    worker.start()
    yield worker
    worker.stop_and_join()


def submit(worker, request, is_closed=lambda: False):
    job = Job(request, is_closed)
    worker.submit(job)
    return job


@pytest.mark.parametrize(
    "error, seen",
    [
        (KeyError("x"), (500, "the answer failed: KeyError: 'x'")),
        (RecursionError("deep"), (500, "the answer failed: RecursionError: deep")),
        (ApiError(400, "wrong", "seed"), (400, "wrong")),
    ],
    ids=str,
)
def test_a_request_that_fails_ends_alone(worker, error, seen):
    failed, good = submit(worker, error), submit(worker, "good")
    with pytest.raises(ApiError) as caught:
        list(failed.events())
    assert (caught.value.status, caught.value.message) == seen
    assert list(good.events()) == ["good"] and worker.is_healthy


def test_mistakes_of_the_client_keep_their_words_and_leavers_are_counted(worker):
    with pytest.raises(ValueError, match="^no such block$"):
        list(submit(worker, ValueError("no such block")).events())
    with pytest.raises(ClientGone):
        list(submit(worker, ClientGone()).events())
    assert "mlx_dflash_clients_gone_total 1" in worker.metrics.page()


def test_stopping_ends_the_answer_in_progress_and_refuses_those_that_wait(worker):
    worker.generator.may_answer.clear()
    running = submit(worker, "running")
    assert worker.generator.is_answering.wait(30)
    waiting = submit(worker, "waiting")
    stopping = threading.Thread(target=worker.stop_and_join)
    stopping.start()
    assert wait_until(lambda: not worker.is_healthy)
    worker.generator.may_answer.set()
    stopping.join(30)
    assert list(running.events()) == ["running"]
    with pytest.raises(ApiError, match="cannot generate any more") as caught:
        list(waiting.events())
    assert caught.value.status == 503 and worker.num_waiting == 0
    with pytest.raises(ApiError, match="cannot generate any more"):
        submit(worker, "late")


def test_those_that_left_take_no_place_in_the_queue(worker):
    worker.generator.may_answer.clear()
    submit(worker, "running")
    left = submit(worker, "left", is_closed=lambda: True)
    jobs = [left, submit(worker, "given up"), submit(worker, "waits")]
    with pytest.raises(ApiError, match="2 requests are waiting already"):
        submit(worker, "too many")
    jobs[1].give_up()
    assert worker.num_waiting == 2
    late = submit(worker, "late")
    worker.generator.may_answer.set()
    assert list(late.events()) == ["late"]


@pytest.mark.parametrize("error", [ValueError("no such model"), KeyError("x")], ids=repr)
def test_a_pair_that_cannot_be_loaded_ends_the_thread(error):
    generator = Stub(error)
    worker = Worker(generator, Metrics(), max_queue=2)
    with pytest.raises(type(error), match=str(error)):
        worker.start()
    assert not worker.is_healthy and not generator.threads[0].is_alive()


def test_everything_runs_in_one_thread():
    worker = Worker(Stub(), Metrics(), max_queue=2)
    worker.start()
    list(submit(worker, "x").events())
    worker.stop_and_join()
    assert len(worker.generator.threads) == 3 and len(set(worker.generator.threads)) == 1
    assert worker.generator.threads[0] is not threading.current_thread()
