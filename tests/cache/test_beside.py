"""Jobs: their order, what they give and raise, and the end of the thread that runs them."""

import gc
import subprocess
import sys
import threading

import pytest

from strata_core.cache.beside import Beside
from strata_core.errors import EngineError
from strata_core.testing.jobs import AtOnce

GUARD = 120.0


@pytest.fixture(params=["at once", "beside"])
def jobs(request):
    made = AtOnce() if request.param == "at once" else Beside("test-jobs")
    yield made
    made.close(GUARD)


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_jobs_run_in_their_order_and_tell_what_they_gave(jobs):
    ran = []
    made = [jobs.begin(lambda n=n: ran.append(n) or n * n) for n in range(50)]
    assert [job.wait(GUARD) and job.result() for job in made] == [n * n for n in range(50)]
    assert ran == list(range(50))
    assert all(job.work is None for job in made), "what a function holds goes with it"


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), KeyboardInterrupt()])
def test_what_a_job_raises_is_raised_where_it_is_asked_and_the_next_one_runs(jobs, error):
    def fail():
        raise error

    failing, next_one = jobs.begin(fail), jobs.begin(lambda: 5)
    assert next_one.wait(GUARD)
    assert next_one.result() == 5
    assert failing.done
    for _ in range(2):
        with pytest.raises(type(error)):
            failing.result()


def test_a_look_at_a_job_that_takes_long_waits_for_nothing():
    jobs, slow = Beside("test-jobs"), threading.Event()
    job = jobs.begin(lambda: slow.wait(GUARD))
    assert not job.done
    assert not job.wait(0)
    assert not job.wait(-1), "a limit that has passed"
    slow.set()
    assert job.wait(None)
    assert job.result()
    jobs.close(GUARD)


def test_there_is_no_thread_before_the_first_job_and_none_after_the_end():
    jobs = Beside("test-none")
    assert threads("test-none") == []
    jobs.close(GUARD)
    jobs = Beside("test-none")
    jobs.begin(lambda: None)
    assert len(threads("test-none")) == 1
    for _ in range(2):
        jobs.close(GUARD)
    assert threads("test-none") == []


def test_at_the_end_what_is_under_way_is_waited_for_and_the_rest_given_up():
    jobs, slow, begun = Beside("test-end"), threading.Event(), threading.Event()
    first = jobs.begin(lambda: begun.set() or slow.wait(GUARD))
    never = jobs.begin(lambda: pytest.fail("the thread was to end"))
    assert begun.wait(GUARD)
    with pytest.raises(EngineError, match="test-end did not come to an end"):
        jobs.close(0.01)
    after = jobs.begin(lambda: pytest.fail("the thread was to end"))
    for job in (never, after):
        assert job.wait(None), "nobody waits for what is not run"
        with pytest.raises(EngineError, match="was not"):
            job.result()
    assert not first.done
    slow.set()
    assert first.wait(GUARD)
    for thread in threads("test-end"):
        thread.join(GUARD)
    assert threads("test-end") == []


@pytest.mark.parametrize("busy", [False, True])
def test_the_thread_ends_where_nobody_has_a_hold_of_its_jobs(busy):
    jobs, slow = Beside("test-dropped"), threading.Event()
    job = jobs.begin(lambda: slow.wait(GUARD))
    if not busy:
        slow.set()
        assert job.wait(GUARD)
    (thread,) = threads("test-dropped")
    del jobs
    gc.collect()
    slow.set()
    thread.join(GUARD)
    assert not thread.is_alive()
    assert job.done


def test_a_job_that_holds_its_own_thread_ends_it():
    """The last hold may be the job's own: then the thread is told to end by itself."""
    jobs, slow = Beside("test-own"), threading.Event()

    def work(held):
        slow.wait(GUARD)

    jobs.begin(lambda held=jobs: work(held))
    (thread,) = threads("test-own")
    del jobs
    gc.collect()
    assert thread.is_alive()
    slow.set()
    thread.join(GUARD)
    assert not thread.is_alive()


AT_EXIT = """
import atexit

jobs = []


def end():
    print(jobs[0].begin(lambda: 5).wait(60.0))
    jobs[0].close(60.0)


atexit.register(end)  # before anything of the package's is: so it runs after that
from strata_core.cache.beside import Beside

jobs.append(Beside("test-exit"))
jobs[0].begin(lambda: None).wait(None)
"""


def test_jobs_are_done_while_the_interpreter_ends():
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
