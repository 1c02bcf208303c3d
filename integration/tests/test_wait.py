"""A wait ends at its deadline or at the first error, and says who was asked and why."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import ray
from vime_integration.cluster import ray_cluster
from vime_integration.errors import PipelineError
from vime_integration.wait import gather
from vime_rollout import RolloutError


class Worker:
    def answer(self, value: int) -> int:
        return value

    def sleep(self) -> None:
        time.sleep(60)

    def fail(self) -> None:
        raise RolloutError("no prompts", where="data.jsonl", seen="0 lines", fix="add some")

    def crash(self) -> None:
        os._exit(3)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(cpus=8, environment={"VIME_TEST_CLUSTER": "1"}) as temporary:
        assert os.environ["VIME_TEST_CLUSTER"] == "1"
        assert temporary.is_dir()
        yield
    assert not temporary.exists()
    assert "VIME_TEST_CLUSTER" not in os.environ


def test_an_answer_that_nobody_waits_for_any_more_is_told_to_the_log_and_not_to_the_terminal(caplog, capfd) -> None:
    """Questions to an engine that died are dropped when it is started again; Ray calls their errors unhandled."""
    asked = worker()
    asked.fail.remote()  # type: ignore[attr-defined]
    end = time.monotonic() + 60
    while "Unhandled error" not in caplog.text and time.monotonic() < end:
        time.sleep(0.05)
    assert "no prompts" in caplog.text
    assert "Unhandled error" not in capfd.readouterr().err


def worker() -> object:
    return ray.remote(Worker).options(num_cpus=1).remote()


def test_answers_come_back_by_name_in_the_order_of_the_question() -> None:
    actor = worker()
    tasks = {name: actor.answer.remote(i) for i, name in enumerate(["b", "a", "c"])}
    assert list(gather(tasks, doing="answer", deadline_s=60).items()) == [("b", 0), ("a", 1), ("c", 2)]


def test_the_deadline_names_who_was_silent() -> None:
    quick, slow = worker(), worker()
    gather({"quick": quick.answer.remote(0), "slow": slow.answer.remote(0)}, doing="start", deadline_s=60.0)
    answer = quick.answer.remote(1)
    ray.wait([answer], timeout=60)
    began = time.monotonic()
    with pytest.raises(PipelineError, match="think did not finish in time") as caught:
        gather({"quick": answer, "slow": slow.sleep.remote()}, doing="think", deadline_s=1.0)
    assert caught.value.where == "slow"
    assert time.monotonic() - began < 30
    ray.kill(slow)


def test_the_first_error_ends_the_wait_as_it_is_with_the_remote_traceback() -> None:
    failing, slow = worker(), worker()
    gather({"failing": failing.answer.remote(0), "slow": slow.answer.remote(0)}, doing="start", deadline_s=60.0)
    began = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        gather({"slow": slow.sleep.remote(), "failing": failing.fail.remote()}, doing="read", deadline_s=60.0)
    assert (caught.value.where, caught.value.fix) == ("data.jsonl", "add some")
    assert any("raised in failing while it was asked to read" in note for note in caught.value.__notes__)
    assert time.monotonic() - began < 30
    ray.kill(slow)


def test_a_process_that_dies_is_named() -> None:
    actor = worker()
    with pytest.raises(PipelineError, match="a process of the run died") as caught:
        gather({"trainer-3": actor.crash.remote()}, doing="train", deadline_s=60.0)
    assert caught.value.where == "trainer-3"
    assert caught.value.expected == "that it would train"


def test_what_is_watched_can_end_the_wait() -> None:
    slow = worker()

    def watch() -> None:
        raise PipelineError("engine-1 died")

    with pytest.raises(PipelineError, match="engine-1 died"):
        gather({"slow": slow.sleep.remote()}, doing="wait", deadline_s=60.0, watch=watch)
    ray.kill(slow)
