"""Cores, memory and load from files that look like /proc and a control group."""

import os

import pytest

from swarm_agent.telemetry.host import LIMITS_EVERY, HostProbe, link_mbit_s

MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n"
)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "proc/stat").write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/agent.service\n")
    (tmp_path / "cgroup/system.slice/agent.service").mkdir(parents=True)
    return tmp_path


def probe(files):
    return HostProbe(files / "proc", files / "cgroup")


def test_without_limits_the_machine_counts(files):
    reading = probe(files).read()
    assert reading.cpu_count == len(os.sched_getaffinity(0))
    assert reading.memory_total_bytes == 16_000_000 * 1024
    assert reading.memory_available_bytes == 8_000_000 * 1024


def test_a_limit_of_any_group_above_counts(files):
    (files / "cgroup/system.slice/memory.max").write_text("1073741824\n")
    (files / "cgroup/system.slice/agent.service/memory.max").write_text("max\n")
    (files / "cgroup/cpu.max").write_text("50000 100000\n")
    reading = probe(files).read()
    assert reading.memory_total_bytes == 2**30
    assert reading.memory_available_bytes == 2**30
    assert reading.cpu_count == 1


def test_limits_of_version_1_count(files):
    (files / "proc/self/cgroup").write_text("4:memory:/box\n3:cpu,cpuacct:/box\n")
    (files / "cgroup/memory/box").mkdir(parents=True)
    (files / "cgroup/memory/box/memory.limit_in_bytes").write_text("2147483648\n")
    assert probe(files).read().memory_total_bytes == 2**31


def test_limits_are_read_again_now_and_then(files):
    host = probe(files)
    host.read()
    (files / "cgroup/memory.max").write_text("1073741824\n")
    readings = [host.read() for _ in range(LIMITS_EVERY)]
    assert readings[0].memory_total_bytes == 16_000_000 * 1024
    assert readings[-1].memory_total_bytes == 2**30


def test_utilisation_is_the_busy_part_since_the_last_reading(files):
    host = probe(files)
    assert host.read().cpu_utilisation_ratio == pytest.approx(0.2)
    (files / "proc/stat").write_text("cpu  175 0 100 725 100 0 0 0 0 0\n")
    assert host.read().cpu_utilisation_ratio == pytest.approx(0.75)
    assert host.read().cpu_utilisation_ratio == pytest.approx(0.75)


def test_the_real_files_can_be_read():
    reading = HostProbe().read()
    assert reading.cpu_count >= 1
    assert 0 < reading.memory_available_bytes <= reading.memory_total_bytes


@pytest.mark.parametrize(
    ("told", "speed"),
    [("10000\n", 10_000), ("-1\n", 0), ("4294967295\n", 0), ("fast\n", 0), (None, 0)],
)
def test_the_speed_of_an_interface_is_that_of_its_driver_if_it_knows_one(tmp_path, told, speed):
    (tmp_path / "eth0").mkdir()
    if told is not None:
        (tmp_path / "eth0/speed").write_text(told)
    assert link_mbit_s("eth0", tmp_path) == link_mbit_s("eth0:1", tmp_path) == speed
    assert link_mbit_s("", tmp_path) == 0


def test_a_bridge_is_as_fast_as_what_is_behind_it(tmp_path):
    for name, told in (("br0", "-1"), ("eth0", "25000"), ("tap0", "10")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(told)
    for port in ("eth0", "tap0"):
        (tmp_path / "br0/brif" / port).mkdir(parents=True)
    assert link_mbit_s("br0", tmp_path) == 25_000
