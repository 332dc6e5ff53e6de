"""An agent and its jobs on a real NVIDIA GPU and its driver, as far as one GPU goes."""

import re
import subprocess
import time
from pathlib import Path

import pynvml
import pytest

from tests.agent.testing import POLL_S, start_agents, wait_until_sync
from tests.cluster.conftest import converge
from tests.elastic.testing import TRAIN

SCRIPT = str(Path(__file__).with_name("train_cnn.py"))
MIB = 2**20
HOLD = "import torch, time; held = torch.zeros(2**28, device='cuda'); print('holds', flush=True); time.sleep(600)"


def has_gpu() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return bool(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU is here"),
]


@pytest.fixture
def agent():
    with start_agents(1, 0, {"dcgm_metrics": True}) as agents:
        converge(agents)
        yield agents[0]


def gpu_of(agent):
    """The first GPU, once the agent has read it."""
    gpus = agent.get(f"/v1/nodes/{agent.name}")["gpus"]
    while not gpus:
        time.sleep(POLL_S)
        gpus = agent.get(f"/v1/nodes/{agent.name}")["gpus"]
    return gpus[0]


def begins(agent, job):
    """From which step the present attempt goes on, as soon as it says so."""
    return re.findall(r"begins at step (\d+)", agent.output(job))


def asked(*fields):
    """What nvidia-smi tells of the first GPU."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(zip(fields, line.strip().split(", "), strict=True))


def train(agent, **spec):
    env = {"OMP_NUM_THREADS": "4", **spec.pop("env")}
    return agent.submit(str(TRAIN), SCRIPT, gpus_per_rank=1, elastic=True, env=env, **spec)


def test_the_agent_tells_of_a_gpu_what_nvidia_smi_tells(agent):
    gpu, smi = gpu_of(agent), asked("uuid", "name", "memory.total", "driver_version", "temperature.gpu", "power.draw")
    assert (gpu["uuid"], gpu["is_simulated"], gpu["health"], gpu["note"]) == (smi["uuid"], False, "ok", "")
    assert gpu["model"] == smi["name"]
    assert gpu["memory_bytes"] // MIB == pytest.approx(int(smi["memory.total"]), rel=0.01)
    assert gpu["temperature_celsius"] == pytest.approx(float(smi["temperature.gpu"]), abs=10)
    assert gpu["power_watts"] == pytest.approx(float(smi["power.draw"]), rel=0.5)
    assert agent.counted("swarm_gpus", state="free") == agent.counted("swarm_gpus")
    told = {line.split("{")[0] for line in agent.page_of_metrics().splitlines() if "DCGM_FI" in line}
    assert {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_FB_USED"} <= told
    checks = {check["name"]: check for check in agent.get("/v1/doctor")["items"]}
    assert all(check["status"] != "failed" for check in checks.values()), checks


def test_a_job_trains_on_the_gpu_that_it_was_given_and_is_seen_on_it(agent):
    job = train(agent, env={"STEPS": "1500"})
    wait_until_sync(lambda: "step 100 " in agent.output(job), what="it trains")
    wait_until_sync(lambda: (gpu_of(agent)["utilisation_ratio"] or 0) > 0.02, what="its use of the GPU is told")
    gpu = gpu_of(agent)
    assert (gpu["state"], gpu["job_id"], gpu["health"]) == ("leased", job["id"], "ok")
    assert gpu["memory_used_bytes"] > 300 * MIB
    assert any("python" in each for each in gpu["processes"]), gpu["processes"]
    assert agent.counted("swarm_gpu_foreign_processes") == 0
    done = agent.ended(job)
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    output = agent.output(job)
    assert gpu["uuid"].removeprefix("GPU-") in output
    first, *_, last = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert last < first / 10
    wait_until_sync(lambda: gpu_of(agent)["state"] == "free", what="the GPU is free again")


def test_a_job_that_gives_way_goes_on_from_its_checkpoint(agent):
    parameters = {"threshold1_gpu_s": 1.0, "minimum_run_s": 0.0}
    assert agent.call("PUT", "/v1/config", {"policy": "las", "parameters": parameters})[0] == 200
    long = train(agent, env={"STEPS": "20000", "EVERY": "100"})
    wait_until_sync(lambda: "step 300 " in agent.output(long), what="it trains")
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{long['id']}")["checkpoint"], what="a checkpoint is committed")
    before = agent.output(long)
    short = agent.submit(str(TRAIN), "-c", "import torch; print(torch.cuda.get_device_name())", gpus_per_rank=1)
    assert agent.ended(short)["end_reason"] == "completed"
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{long['id']}")["attempt"] == 2, what="it runs again")
    wait_until_sync(lambda: begins(agent, long) not in ([], ["0"]), what="it trains again")
    now = agent.get(f"/v1/jobs/{long['id']}")
    begun = int(begins(agent, long)[-1])
    assert now["preemptions"] == 1
    assert begun >= 100
    assert begun % 100 == 0
    wait_until_sync(lambda: f"step {begun + 100} " in agent.output(long), what="it goes on")
    losses = dict(re.findall(r"step (\d+) loss (\S+)", before))
    again = dict(re.findall(r"step (\d+) loss (\S+)", agent.output(long)))
    assert float(again[str(begun + 20)]) < float(losses["20"]) / 2, "it begins with what it had learned"
    agent.call("POST", f"/v1/jobs/{long['id']}/cancel")


def test_a_gpu_that_somebody_else_uses_is_given_to_nobody_until_they_end(agent):
    with subprocess.Popen([TRAIN, "-c", HOLD], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "holds\n"
            wait_until_sync(lambda: gpu_of(agent)["state"] == "foreign", what="the other process is seen")
            assert str(other.pid) in gpu_of(agent)["note"]
            job = agent.submit("true", gpus_per_rank=1)
            time.sleep(3)
            assert agent.get(f"/v1/jobs/{job['id']}")["state"] == "queued"
        finally:
            other.kill()
    assert agent.ended(job)["end_reason"] == "completed"


def test_an_agent_that_is_killed_finds_its_job_on_the_gpu_again(agent):
    job = train(agent, env={"STEPS": "2000"})
    wait_until_sync(lambda: "step 100 " in agent.output(job), what="it trains")
    agent.kill()
    agent.restart()
    wait_until_sync(lambda: gpu_of(agent)["job_id"] == job["id"], what="the GPU is the job's again")
    assert gpu_of(agent)["health"] == "ok", gpu_of(agent)
    done = agent.ended(job)
    assert (done["end_reason"], done["attempt"], done["restarts"]) == ("completed", 1, 0)


def test_a_job_of_no_gpu_sees_none(agent):
    job = agent.submit(str(TRAIN), "-c", "import torch; print(torch.cuda.is_available())")
    assert agent.ended(job)["end_reason"] == "completed"
    assert agent.output(job) == "False\n"
