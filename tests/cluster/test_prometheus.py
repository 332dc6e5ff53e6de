"""The scrape configuration of docs/monitoring, with a real Prometheus and real agents."""

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.agent.testing import free_port, wait_until_sync
from tests.testbed.found import working

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("cluster-prometheus"),
    pytest.mark.skipif(not working("prometheus"), reason="prometheus is not installed (Debian package)"),
]
SHIPPED = Path(__file__).parents[2] / "docs/monitoring/prometheus.yml"
DISCOVERY = "  # - job_name: swarm"


def configuration(*, is_discovered):
    """The one half of the file, or the other, which is commented out."""
    head, mark, rest = SHIPPED.read_text().partition(DISCOVERY)
    if not is_discovered:
        return head
    found = "".join(line.replace("  # ", "  ", 1) + "\n" for line in (mark + rest).splitlines())
    return head.partition("  # Every agent by name.")[0] + found


@pytest.mark.parametrize("is_discovered", [False, True], ids=["named", "discovered"])
def test_prometheus_reads_every_agent(swarm, tmp_path, is_discovered):
    text = configuration(is_discovered=is_discovered)
    hosts = ["{}:{}".format(*agent.address) for agent in swarm]
    for shipped, host in zip(("gpu1:7433", "gpu2:7433", "witness:7433"), hosts, strict=True):
        text = text.replace(shipped, host)
    (tmp_path / "token").write_text(swarm[0].token)
    text = text.replace("/etc/prometheus/swarm-token", str(tmp_path / "token")).replace("15s", "1s")
    document = yaml.safe_load(text)
    document.pop("rule_files")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(document))
    port = free_port()
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    def healthy():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=5) as answer:
                targets = json.load(answer)["data"]["activeTargets"]
        except OSError:
            return []
        return sorted(each["labels"]["instance"] for each in targets if each["health"] == "up")

    try:
        expected = [agent.name for agent in swarm] if is_discovered else sorted(hosts)
        wait_until_sync(lambda: healthy() == expected, what=f"all targets are up, see {tmp_path}/log")
    finally:
        process.terminate()
        process.wait(60)
