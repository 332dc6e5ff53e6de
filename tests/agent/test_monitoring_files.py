"""The monitoring files in docs/monitoring speak of metrics that exist, and their rules are valid."""

import inspect
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from swarm_agent.metrics import exposition, gpu, jobs, observed
from tests.testbed.found import working

MONITORING = Path(__file__).parents[2] / "docs/monitoring"
DASHBOARDS = sorted(MONITORING.glob("grafana-*.json"))
SUFFIXES = re.compile(r"_(bucket|sum|count|total|info)$")


def published_names():
    """Names of all families, read from the sources, since no single page shows every one."""
    sources = [inspect.getsource(module) for module in (exposition, gpu, jobs, observed)]
    names = set(re.findall(r'"(swarm_[a-z0-9_]+)"', "".join(sources)))
    return names | {family.name for family in observed.Observed().registry.collect()}


def unknown_names(text):
    known = published_names()
    used = set(re.findall(r"\b(?:swarm|process)_[a-z0-9_]+", text))
    return {name for name in used if name not in known and SUFFIXES.sub("", name) not in known}


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.name)
def test_dashboards_use_a_data_source_variable_and_existing_metrics(file):
    board = json.loads(file.read_text())
    assert board["templating"]["list"][0]["type"] == "datasource"
    assert "uid" not in board
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}
    expressions = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    assert unknown_names(expressions) == set()


def test_there_are_two_dashboards():
    assert [file.name for file in DASHBOARDS] == ["grafana-node.json", "grafana-swarm.json"]


def test_alert_rules_use_existing_metrics():
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    expressions = [rule["expr"] for rule in rules]
    assert len(expressions) >= 8
    assert unknown_names(" ".join(expressions)) == set()


@pytest.mark.skipif(not working("promtool"), reason="promtool is not installed (Debian package prometheus)")
def test_promtool_accepts_rules_and_scrape_configuration():
    for arguments in (["rules", "alerts.yml"], ["config", "--syntax-only", "prometheus.yml"]):
        result = subprocess.run(
            ["promtool", "check", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


XID_SERIES = 'swarm_gpu_xid_errors_total{instance="gpu1:7433",gpu="0",xid="79"}'


@pytest.mark.skipif(not working("promtool"), reason="promtool is not installed (Debian package prometheus)")
@pytest.mark.parametrize(
    ("values", "is_told"), [("_x30 1x60", True), ("1x60 2x30", True), ("1x90", False)], ids=["first", "next", "old"]
)
def test_every_hardware_error_of_a_gpu_is_told_and_none_for_ever(values, is_told, tmp_path):
    """The first one, too: the series begins with it."""
    labels = {"severity": "warning", "instance": "gpu1:7433", "gpu": "0", "xid": "79"}
    texts = {
        "summary": "XID 79 on GPU 0 of gpu1:7433",
        "description": "A hardware error. The GPU is not offered until it was reset and the agent restarted.",
    }
    alert = {
        "alertname": "SwarmGpuXid",
        "eval_time": "35m" if values.startswith("_") else "65m",
        "exp_alerts": [{"exp_labels": labels, "exp_annotations": texts}] if is_told else [],
    }
    case = {"interval": "1m", "input_series": [{"series": XID_SERIES, "values": values}], "alert_rule_test": [alert]}
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": [str(MONITORING / "alerts.yml")], "tests": [case]}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


FREE, QUEUED, LIMIT = 'swarm_gpus{state="free"}', 'swarm_jobs{state="queued"}', "swarm_store_limit_bytes"
STRANGERS, REPORTS = "swarm_strangers_turned_away_total", "swarm_reports_total"
WORK, COPIES, DISK = "swarm_work_store_bytes", "swarm_checkpoint_store_bytes", "swarm_disk_size_bytes"
FIRING = [
    ("SwarmNodeDrainsForLong", {"swarm_node_draining": "1x1500"}, "25h", 1),
    ("SwarmNodeDrainsForLong", {"swarm_node_draining": "1x700 0 1x799"}, "25h", 0),
    ("SwarmNodeDrainsForLong", {"swarm_node_draining": "1x90"}, "90m", 0),
    ("SwarmGpusFreeWhileJobsWait", {FREE: "4x30", QUEUED: "2x30"}, "20m", 1),
    ("SwarmGpusFreeWhileJobsWait", {FREE: "4x30", QUEUED: "0x30"}, "20m", 0),
    ("SwarmGpusFreeWhileJobsWait", {FREE: "0x30", QUEUED: "2x30"}, "20m", 0),
    ("SwarmStoreFull", {WORK: "95x90", f'{LIMIT}{{store="work"}}': "100x90"}, "80m", 1),
    ("SwarmStoreFull", {WORK: "80x90", f'{LIMIT}{{store="work"}}': "100x90"}, "80m", 0),
    ("SwarmStoreFull", {WORK: "95x90", f'{LIMIT}{{store="environment"}}': "10x90"}, "80m", 0),
    ("SwarmCheckpointsLarge", {COPIES: "6x30", DISK: "10x30"}, "20m", 1),
    ("SwarmCheckpointsLarge", {COPIES: "4x30", DISK: "10x30"}, "20m", 0),
    ("SwarmReportsTooMany", {f'{REPORTS}{{result="too_many"}}': "0+60x40"}, "30m", 1),
    ("SwarmReportsTooMany", {f'{REPORTS}{{result="taken"}}': "0+60x40"}, "30m", 0),
    ("SwarmStrangersTurnedAway", {f'{STRANGERS}{{reason="late"}}': "0+9x40"}, "30m", 1),
    ("SwarmStrangersTurnedAway", {f'{STRANGERS}{{reason="late"}}': "0+1x40"}, "30m", 0),
    ("SwarmCoreErrors", {"swarm_step_errors_total": "0x10 1x5"}, "12m", 1),
    ("SwarmCoreErrors", {"swarm_effect_errors_total": "0x10 1x5"}, "12m", 0),
    ("SwarmEffectErrors", {"swarm_effect_errors_total": "0x10 1x5"}, "12m", 1),
]
"""A rule, what its series say from minute to minute, when it is asked, and whether it fires."""


def named(series):
    """As `name{labels}` of one agent."""
    name, _, labels = series.partition("{")
    return f'{name}{{job="swarm",instance="gpu1:7433",{labels}'.rstrip(",}") + "}"


@pytest.mark.skipif(not working("promtool"), reason="promtool is not installed (Debian package prometheus)")
def test_rules_fire_for_what_they_are_about_and_for_nothing_else(tmp_path):
    """A rule that fires is asked for by its own series, ALERTS."""
    tests = []
    for alert, series, at, count in FIRING:
        fires = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
        asked = {"expr": fires, "eval_time": at, "exp_samples": [{"labels": "{}", "value": count}]}
        given = [{"series": named(name), "values": values} for name, values in series.items()]
        tests.append({"interval": "1m", "input_series": given, "promql_expr_test": [asked]})
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": [str(MONITORING / "alerts.yml")], "tests": tests}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_name_that_does_not_exist_would_be_found():
    assert unknown_names("rate(swarm_nope_total[5m]) + swarm_gpus") == {"swarm_nope_total"}
