"""schemathesis against a live swarm: what its OpenAPI document allows, and what it does not, is answered without 5xx.

Afterwards every agent starts again from what it has on disk, and the swarm runs a job.
"""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.acceptance, pytest.mark.cluster]

COMMAND = Path(__file__).resolve().parents[2] / ".venv-api/bin/schemathesis"
BINARY = "putBlobs"  # the tool knows no body of that type
SEED = 2_026
EXAMPLES = 40
TIME_LIMIT_S = 1_500


def hurl(agent, folder):
    """Run it; its exit code, and how often each status was answered."""
    document, record = folder / "openapi.json", folder / "answers.ndjson"
    document.write_text(json.dumps(without_streams(agent.get("/openapi.json"))))
    command = [
        COMMAND, "run", str(document), "--url", agent.url, "--exclude-operation-id", BINARY,
        "--header", f"Authorization: Bearer {agent.token}", "--request-timeout", "20", "--workers", "4",
        "--checks", "not_a_server_error", "--continue-on-failure", "--no-shrink", "--warnings", "off",
        "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", str(SEED),
        "--suppress-health-check", "all", "--report", "ndjson", "--report-ndjson-path", str(record),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    return done, Counter(re.findall(r'"status_code":\s*(\d+)', record.read_text()))


def without_streams(document):
    """The document without the parameter that makes an answer endless: the tool would read it for ever."""
    for operations in document["paths"].values():
        for operation in operations.values():
            if isinstance(operation, dict) and "parameters" in operation:
                operation["parameters"] = [each for each in operation["parameters"] if each.get("name") != "follow"]
    return document


def test_no_request_that_schemathesis_thinks_of_is_answered_with_5xx_or_harms_an_agent(tmp_path, report, stopwatch):
    if not COMMAND.exists():
        pytest.skip("no .venv-api (schemathesis); make it with make acceptance")
    with start_agents(3) as agents:
        with stopwatch("schemathesis"):
            done, statuses = hurl(agents[0], tmp_path)
        report(f"answers by status: {json.dumps(dict(sorted(statuses.items())))}")
        assert sum(statuses.values()) > 1_000, done.stdout[-3_000:] + done.stderr[-2_000:]
        assert [status for status in statuses if status.startswith("5")] == [], done.stdout[-6_000:]
        for agent in agents:
            agent.stop()
        for agent in agents:
            agent.restart()
        for agent in agents:
            wait_until_sync(lambda agent=agent: agent.is_live(), 30, f"{agent.name} answers")
        wait_until_sync(lambda: agents[1].get("/v1/status")["gpus"]["total"] == 6, 60, "all GPUs are known")
        job = agents[1].submit("true", ranks=1, gpus_per_rank=0)
        assert agents[2].ended(job, 60)["end_reason"] == "completed"
