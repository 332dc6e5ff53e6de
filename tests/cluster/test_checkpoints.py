"""Checkpoints as a training script commits them, on real agents: what counts, and what the script is told otherwise."""

import shlex
import sys

import pytest

from tests.agent.testing import wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-checkpoints")]

SHELL = """
echo weights > "$SWARM_CHECKPOINT_DIR/step-1"
swarm checkpoint step-1; echo "step-1 $?"
swarm checkpoint step-2; echo "step-2 $?"
swarm checkpoint ../step-1; echo "climbing $?"
mkfifo "$SWARM_CHECKPOINT_DIR/pipe"
swarm checkpoint pipe; echo "pipe $?"
"""

PYTHON = """
import swarm_elastic
try:
    swarm_elastic.checkpoint("step-2", wait=True)
except swarm_elastic.CheckpointRefused as refusal:
    print(refusal.error, "|", refusal)
"""

# When it is to stop, it saves what it has.
LATE = """
trap 'echo weights > "$SWARM_CHECKPOINT_DIR/late"; swarm checkpoint late 2>>"$0"; echo "late $?" >>"$0"; exit 0' TERM
echo waiting
while :; do sleep 0.1; done
"""


def test_name_that_cannot_be_committed_is_refused_and_the_script_is_told(swarm):
    agent = swarm[0]
    job = agent.submit("sh", "-c", SHELL + f"{shlex.quote(sys.executable)} -c {shlex.quote(PYTHON)}", nodes=["n2"])
    done = agent.ended(job)
    out, err = agent.output(job), agent.output(job, "stderr")
    folder = swarm[1].data_dir / "checkpoints" / job["id"] / "1"
    absent = f"{folder}/step-2 does not exist"
    remedy = "write it into SWARM_CHECKPOINT_DIR first, then commit it"
    assert out.splitlines()[:4] == ["step-1 0", "step-2 1", "climbing 1", "pipe 1"], out + err
    assert f"swarm: checkpoint step-2 was not committed: {absent}\n  {remedy}\n" in err
    assert "swarm: checkpoint ../step-1 was not committed: " in err
    assert "swarm: checkpoint pipe was not committed: pipe is no file, folder or link" in err
    assert out.splitlines()[4:] == [f"not_found | checkpoint 'step-2': {absent} ({remedy})"]
    assert (done["end_reason"], done["checkpoint"]["name"]) == ("completed", "step-1")


def test_checkpoint_of_an_attempt_that_was_given_up_is_refused_and_the_script_is_told(fresh_swarm, tmp_path):
    """n3 dies with one rank, so the other one on n2 is stopped; what it commits while it stops counts no more."""
    agent, owner, lost = fresh_swarm
    told = tmp_path / "told"
    job = agent.submit("sh", "-c", LATE, str(told), ranks=2, gpus_per_rank=2, nodes=["n2", "n3"])
    wait_until_sync(lambda: agent.output(job).count("waiting") == 2, what="both ranks run")
    lost.kill()
    wait_until_sync(lambda: told.exists() and "\nlate " in told.read_text(), what="the rank on n2 has tried")
    assert told.read_text() == (
        "swarm: checkpoint late was not committed: it does not count: attempt 1 was given up; "
        "the next one is not placed yet\n  end this process: it is not the job any more\nlate 1\n"
    )
    assert agent.get(f"/v1/jobs/{job['id']}")["checkpoint"] is None
    assert f"checkpoint not committed job_id={job['id']} attempt=1 name=late" in owner.log_file.read_text()


def test_job_that_is_given_another_size_goes_on_from_its_checkpoint_and_says_what_that_cost(swarm, shell):
    agent = swarm[0]
    begin = 'ls "$SWARM_RESUME_FROM" 2>/dev/null; echo "begins with $WORLD_SIZE"'
    save = 'echo x > "$SWARM_CHECKPOINT_DIR/w"; [ "$RANK" = 0 ] && swarm checkpoint w; exec sleep 60'
    job = agent.submit("sh", "-c", f"{begin}; {save}", ranks=1, gpus_per_rank=1)
    handle = job["handle"]

    def now():
        return agent.get(f"/v1/jobs/{job['id']}")

    def saved(attempt):
        wait_until_sync(lambda: (now()["checkpoint"] or {}).get("attempt") == attempt, what=f"{attempt} has saved")

    saved(1)
    code, _, err = shell(swarm, "scale", handle, "2")
    assert (code, f"job {handle} has 1 rank and gets 2 ranks as soon as there is room" in err) == (0, True), err
    saved(2)
    assert "Rescaled:      1 to 2 ranks, " in shell(swarm, "status", handle)[1]
    assert agent.output(job).count("begins with 2") == 2
    assert "/1/w" in agent.output(job)

    home = {share["node"] for share in now()["nodes"]}
    code, _, err = shell(swarm, "migrate", handle, "--off", ",".join(home))
    assert code == 0, err
    saved(3)
    assert not home & {share["node"] for share in now()["nodes"]}
    assert [each["ranks_after"] for each in now()["rescalings"]] == [2, 2]

    assert shell(swarm, "scale", handle, "1:1:2")[0] == 2
    code, _, err = shell(swarm, "migrate", handle, "--to", "n9")
    assert (code, "there is no node 'n9'" in err) == (3, True), err
    assert shell(swarm, "cancel", handle, "--grace", "0s")[0] == 0
    agent.ended(job)
    code, _, err = shell(swarm, "scale", handle, "1")
    assert (code, "has ended" in err) == (5, True), err
