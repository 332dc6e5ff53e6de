"""Reading what a job wrote before it had to start anew."""

import pytest

from tests.agent.testing import wait_until_sync

pytestmark = [pytest.mark.cluster]

SCRIPT = "echo rank $RANK of attempt $SWARM_ATTEMPT; exec sleep 600"


def lines_of(attempt, *ranks):
    return [f"rank {rank} of attempt {attempt}" for rank in ranks]


def test_output_of_the_last_attempt_is_read_while_the_job_waits_and_of_any_attempt_later(fresh_swarm, shell):
    n1, _, n3 = fresh_swarm
    job = n1.submit("sh", "-c", SCRIPT, ranks=2, gpus_per_rank=2, nodes=["n2", "n3"])
    path = f"/v1/jobs/{job['id']}"
    wait_until_sync(lambda: sorted(n1.output(job).splitlines()) == lines_of(1, 0, 1), what="attempt 1 writes")
    lost = next(share["first_rank"] for share in n1.get(path)["nodes"] if share["node"] == "n3")
    n3.kill()
    wait_until_sync(lambda: (n1.get(path)["state"], n1.get(path)["restarts"]) == ("queued", 1), what="the job waits")

    code, out, err = shell(fresh_swarm, "logs", job["id"])
    assert (code, out.splitlines()) == (125, lines_of(1, 1 - lost)), "what is missing from a pipe is no success"
    assert "attempt 1, which is over; the job is queued: " in err
    assert f"no node that answers has output of attempt 1 of rank {lost}; node n3 did not answer and may have it" in err

    with shell.start([n1], "logs", "-f", job["id"]) as follower:
        n3.restart()
        wait_until_sync(lambda: sorted(n1.output(job).splitlines()) == lines_of(2, 0, 1), what="attempt 2 writes")
        code, out, err = shell(fresh_swarm, "logs", "--attempt", "1", job["id"])
        assert (code, sorted(out.splitlines())) == (0, lines_of(1, 0, 1))
        assert "attempt 1, which is over; the job is running" in err
        code, out, err = shell(fresh_swarm, "logs", "--attempt", "3", job["id"])
        assert (code, out) == (2, "")
        assert "there has been no attempt 3: the job is at attempt 2" in err
        n1.call("POST", f"{path}/cancel", {})
        out, err = follower.communicate(timeout=120)
    first, *others = out.splitlines()
    assert first in lines_of(1, 0, 1)
    assert sorted(others)[-2:] == lines_of(2, 0, 1)
    assert "attempt 1, which is over" in err
