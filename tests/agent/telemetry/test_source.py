"""Telemetry against the real nvidia-ml-py and a library with faults, through the real sampler child."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_agent.telemetry.reading import TelemetryState
from swarmsched.resources import GpuHealth, NodeResources

LONG_S, SHORT_S = 20.0, 0.6  # what a hung driver is given
CALLS_PER_GPU = 11  # of a round without the slow-moving values; +1 for a GPU with processes


def status_kb(pid, key):
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith(key))
    return int(line.split()[1])


def sampler_pid(bench):
    child = bench.telemetry._child
    return child.pid if child else 0


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def started(start, **options):
    bench = await start(**options)
    await bench.until(lambda: bench.snapshot.state is TelemetryState.OK)
    return bench


async def test_readings_carry_the_values_in_base_units(nvml, start):
    for field, value in {
        "util_gpu": 37,
        "mem_used": 3 << 30,
        "temp": 61,
        "power_mw": 412_500,
        "energy_mj": 5000,
    }.items():
        nvml.set(2, field, value)
    bench = await started(start)
    gpu = bench.gpu(2)
    assert gpu.utilisation_ratio == 0.37
    assert gpu.memory_used_bytes == 3 << 30
    assert gpu.memory_total_bytes == 80 << 30
    assert gpu.temperature_celsius == 61
    assert gpu.power_watts == 412.5
    assert gpu.power_limit_watts == 700.0
    assert gpu.energy_joules == 5.0
    assert gpu.sm_clock_hz == 1_980_000_000
    assert gpu.ecc_uncorrected_count == 0
    assert gpu.pci_bus_id == "00000000:12:00.0"
    assert gpu.age_s < 1.0
    assert not gpu.is_simulated
    assert "driver 550.54.15" in bench.snapshot.sentence


async def test_first_post_names_all_gpus_and_the_host(nvml, start):
    bench = await started(start)
    resources = bench.posts[0].resources
    assert [gpu.index for gpu in resources.gpus] == [0, 1, 2, 3]
    assert {gpu.model for gpu in resources.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert {gpu.health for gpu in resources.gpus} == {GpuHealth.OK}
    assert resources.cpu_count >= 1
    assert resources.memory_bytes > 2**28


async def test_load_averages_move_slowly_and_are_posted_every_period(nvml, start):
    bench = await started(start)
    for gpu in range(4):
        nvml.set(gpu, "util_gpu", 100)
    await bench.until(lambda: bench.gpu(0).utilisation_ratio == 1.0)
    await bench.rounds(3)
    assert 0.0 < bench.posts[-1].gpu_utilisation_ratio < 0.5


async def test_gpu_that_falls_off_the_bus_is_unhealthy_alone_and_recovers(nvml, start):
    bench = await started(start)
    nvml.fall_off(1)
    await bench.until(lambda: bench.gpu(1).note == "XID 79: fell off the bus")
    assert bench.healths() == ["ok", "unhealthy", "ok", "ok"]
    assert bench.gpu(1).xid_last == 79
    assert bench.gpu(1).utilisation_ratio is None
    assert bench.posts[-1].resources.gpus[1].health is GpuHealth.UNHEALTHY
    await bench.rounds(5)
    assert bench.healths() == ["ok", "unhealthy", "ok", "ok"]
    nvml.recover(1)
    await bench.until(lambda: bench.healths() == ["ok"] * 4)
    assert bench.gpu(1).xid_counts == {79: 1}
    nvml.xid(1, 31)  # events of the device are watched again after the re-initialisation
    await bench.until(lambda: bench.gpu(1).xid_last == 31)


async def test_gpu_lost_without_an_xid_is_unhealthy_alone(nvml, start):
    bench = await started(start)
    nvml.set(3, "err", 15)
    await bench.until(lambda: bench.healths() == ["ok", "ok", "ok", "unhealthy"])
    assert "lost" in bench.gpu(3).note


async def test_gpu_that_is_lost_before_the_start_is_told_in_words(nvml, start):
    nvml.set(0, "err", 15)
    bench = await started(start)
    assert [gpu.index for gpu in bench.snapshot.gpus] == [1, 2, 3]
    assert "GPU 0 is lost" in bench.snapshot.sentence
    nvml.recover(0)
    await bench.until(lambda: [gpu.index for gpu in bench.snapshot.gpus] == [0, 1, 2, 3])
    assert "lost" not in bench.snapshot.sentence


@pytest.mark.parametrize("xids", [(48, 63, 64), (74, 92, 94), (95, 119, 62)])
async def test_hardware_xid_takes_only_that_gpu_away(nvml, start, xids):
    bench = await started(start)
    for gpu, xid in enumerate(xids):
        nvml.xid(gpu, xid)
    await bench.until(lambda: bench.healths() == ["unhealthy"] * 3 + ["ok"])
    assert [bench.gpu(gpu).note.split(":")[0] for gpu in range(3)] == [f"XID {xid}" for xid in xids]


async def test_application_xids_are_counted_and_do_not_speak_against_the_gpu(nvml, start):
    bench = await started(start)
    for xid in (13, 31, 43, 45, 68):
        nvml.xid(0, xid)
    await bench.until(lambda: bench.gpu(0).xid_counts == {13: 1, 31: 1, 43: 1, 45: 1, 68: 1})
    assert bench.healths() == ["ok"] * 4


async def test_double_bit_ecc_error_makes_unhealthy_and_is_counted_once(nvml, start):
    bench = await started(start)
    nvml.xid(0, 48)
    nvml.event(0, 0x2, 0)
    nvml.set(0, "ecc_uncorr", 1)
    await bench.until(lambda: bench.gpu(0).ecc_uncorrected_count == 1)
    assert bench.healths() == ["unhealthy", "ok", "ok", "ok"]
    assert bench.gpu(0).xid_counts == {48: 1}


async def test_uncorrected_ecc_from_before_the_start_counts(nvml, start):
    nvml.set(0, "ecc_uncorr", 2)
    nvml.set(1, "remap_failure", 1)
    nvml.set(2, "mig_on", 1)
    bench = await started(start)
    assert bench.healths() == ["unhealthy", "unhealthy", "unhealthy", "ok"]
    assert bench.gpu(0).note == "2 uncorrectable ECC errors since its last reset"
    assert "row remapping failed" in bench.gpu(1).note
    assert bench.gpu(2).is_mig
    assert "MIG" in bench.gpu(2).note


async def test_failing_call_leaves_out_its_value_only(nvml, start):
    for gpu, code in enumerate((3, 4, 999)):
        nvml.fail(gpu, ["POWER"], code)
    bench = await started(start)
    assert [gpu.power_watts for gpu in bench.snapshot.gpus] == [None, None, None, 70.0]
    assert [gpu.temperature_celsius for gpu in bench.snapshot.gpus] == [35] * 4
    assert bench.healths() == ["ok"] * 4


async def test_gpu_on_which_every_call_fails_becomes_stale_and_comes_back(nvml, start):
    bench = await started(start, telemetry_deadline_s=SHORT_S)
    nvml.set(1, "err", 999)
    await bench.until(lambda: bench.healths() == ["ok", "stale", "ok", "ok"])
    assert bench.snapshot.state is TelemetryState.STALE
    assert bench.gpu(1).utilisation_ratio is None
    nvml.recover(1)
    await bench.until(lambda: bench.healths() == ["ok"] * 4)
    assert bench.snapshot.state is TelemetryState.OK


async def test_slow_call_within_the_deadline_is_no_fault(nvml, start):
    nvml.slow(3, ["UTIL"], 300_000)
    bench = await started(start)
    pid = sampler_pid(bench)
    await bench.rounds(15)
    assert bench.healths() == ["ok"] * 4
    assert sampler_pid(bench) == pid


async def test_hung_call_is_stale_never_idle_and_the_other_gpus_come_back_first(nvml, start):
    bench = await started(start, telemetry_deadline_s=SHORT_S)
    first_pid = sampler_pid(bench)
    nvml.hang(1, ["PROCS"])
    await bench.until(lambda: bench.gpu(1).health is GpuHealth.STALE)
    assert bench.gpu(1).utilisation_ratio is None
    assert bench.gpu(1).memory_used_bytes is None
    await bench.until(lambda: bench.healths() == ["ok", "stale", "ok", "ok"])
    assert bench.posts[-1].resources.gpus[1].note == "the driver did not answer within 0.6 s"
    assert sampler_pid(bench) != first_pid
    assert not is_running(first_pid)
    nvml.hang(1, [])
    await bench.until(lambda: bench.healths() == ["ok"] * 4)


async def test_event_loop_and_stop_are_not_held_up_by_a_hung_driver(nvml, start):
    bench = await started(start, telemetry_deadline_s=LONG_S)
    pid = sampler_pid(bench)
    nvml.hang(0, ["UTIL", "MEM", "PROCS"])
    loop = asyncio.get_running_loop()
    worst = 0.0
    for _ in range(20):
        before = loop.time()
        await asyncio.sleep(0.01)
        worst = max(worst, loop.time() - before)
    assert worst < LONG_S / 2
    before = loop.time()
    await bench.telemetry.stop()
    assert loop.time() - before < LONG_S
    assert not is_running(pid)


async def test_crashed_sampler_is_started_again(nvml, start):
    bench = await started(start)
    pid = sampler_pid(bench)
    os.kill(pid, signal.SIGKILL)
    await bench.until(lambda: sampler_pid(bench) != pid and bench.snapshot.age_s < 0.3)
    assert bench.healths() == ["ok"] * 4
    assert bench.snapshot.restarts == 1


async def test_no_driver_means_no_gpus_and_one_clear_sentence(start, monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    bench = await start()
    await bench.until(lambda: bench.snapshot.state is TelemetryState.ABSENT)
    assert bench.snapshot.sentence == "no NVIDIA driver: libnvidia-ml.so.1 is not installed"
    await bench.rounds(1)
    assert bench.posts[0].resources.gpus == ()
    assert bench.posts[0].resources.cpu_count >= 1


async def test_driver_that_is_not_loaded_is_absent_and_found_when_it_comes(nvml, start, monkeypatch):
    monkeypatch.setattr("swarm_agent.telemetry.source.ABSENT_RETRY_S", 0.2)
    nvml.init_error(9)
    bench = await start()
    await bench.until(lambda: bench.snapshot.state is TelemetryState.ABSENT)
    assert "not loaded" in bench.snapshot.sentence
    nvml.init_error(0)
    await bench.until(lambda: bench.healths() == ["ok"] * 4)


async def test_driver_that_refuses_to_start_is_failed_and_tried_again(nvml, start):
    nvml.init_error(999)
    bench = await start()
    await bench.until(lambda: bench.snapshot.state is TelemetryState.FAILED)
    assert "cannot be initialised" in bench.snapshot.sentence
    nvml.init_error(0)
    await bench.until(lambda: bench.healths() == ["ok"] * 4)


async def test_driver_that_goes_away_leaves_known_gpus_stale_not_gone(nvml, start):
    bench = await started(start, telemetry_deadline_s=SHORT_S)
    nvml.init_error(9)
    nvml.set(0, "err", 1)  # UNINITIALIZED leads to a new init, which fails
    await bench.until(lambda: bench.healths() == ["stale"] * 4)
    assert bench.snapshot.state is TelemetryState.ABSENT
    assert "not loaded" in bench.gpu(2).note


async def test_foreign_process_takes_the_gpu_away_and_is_named(nvml, start):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        nvml.procs(1, [(process.pid, 3 << 30)])
        bench = await started(start)
        first = bench.posts[0].resources.gpus[1]
        assert first.health is GpuHealth.FOREIGN
        assert first.note.startswith(f"pid {process.pid} python")
        assert first.note.endswith("3.0 GiB")
        assert bench.healths() == ["ok", "foreign", "ok", "ok"]
        nvml.procs(1, [])
        await bench.until(lambda: bench.healths() == ["ok"] * 4)
    finally:
        process.communicate()


async def test_own_process_and_its_children_are_not_foreign(nvml, start):
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    shim = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        shim.stdout.readline()
        child = int(Path(f"/proc/{shim.pid}/task/{shim.pid}/children").read_text().split()[0])
        nvml.procs(0, [(child, 1 << 30)])
        given = {shim.pid: set[str]()}
        bench = await started(start, own_gpus=lambda: given)
        assert bench.healths() == ["foreign", "ok", "ok", "ok"], "it was not given to this task"
        given[shim.pid] = {bench.gpu(0).uuid}
        await bench.until(lambda: bench.healths() == ["ok"] * 4)
        assert [(each.pid, each.is_own) for each in bench.gpu(0).processes] == [(child, True)]
    finally:
        shim.communicate()


async def test_note_of_a_foreign_process_is_not_renewed_for_small_changes(nvml, start):
    nvml.procs(1, [(os.getpid(), 3 << 30)])
    bench = await started(start)
    note = bench.gpu(1).note
    nvml.procs(1, [(os.getpid(), (3 << 30) + (100 << 20))])
    await bench.until(lambda: bench.gpu(1).processes[0].memory_bytes > 3 << 30)
    assert bench.gpu(1).note == note
    nvml.procs(1, [(os.getpid(), 6 << 30)])
    await bench.until(lambda: bench.gpu(1).note.endswith("6.0 GiB"))


async def test_sampler_stays_small_and_asks_no_more_than_meant(nvml, start):
    bench = await started(start, telemetry_period_s=0.2, telemetry_deadline_s=5.0)
    assert status_kb(sampler_pid(bench), "VmHWM") <= 25 * 1024
    loop = asyncio.get_running_loop()
    calls, begun_s = nvml.calls, loop.time()
    await bench.rounds(10)
    rounds_at_most = (loop.time() - begun_s) / 0.2 + 2
    assert 4 * CALLS_PER_GPU <= nvml.calls - calls <= 4 * CALLS_PER_GPU * rounds_at_most


async def test_sampler_ends_when_the_agent_is_gone(nvml):
    command = [sys.executable, "-P", "-m", "swarm_agent.telemetry.sampler"]
    sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert b'"hello"' in sampler.stdout.readline()
    sampler.communicate(timeout=60)
    assert sampler.returncode == 0


async def test_sampler_that_cannot_be_started_is_said_so(start, tmp_path):
    bench = await start(argv=[str(tmp_path / "missing")])
    await bench.until(lambda: bench.snapshot.state is TelemetryState.FAILED)
    assert "cannot be started" in bench.snapshot.sentence


async def test_simulated_gpus_say_so_and_are_busy_only_when_booked(start):
    booked = {"SIM-n1-1"}
    bench = await start(simulated_gpus=2, booked_gpus=lambda: booked)
    await bench.rounds(1)
    assert [(gpu.uuid, gpu.is_simulated, gpu.utilisation_ratio) for gpu in bench.snapshot.gpus] == [
        ("SIM-n1-0", True, 0.0),
        ("SIM-n1-1", True, 1.0),
    ]
    assert bench.snapshot.is_simulated
    assert bench.snapshot.sentence == "2 simulated GPUs, as configured; NVML is not asked"
    assert all(gpu.is_simulated for gpu in bench.posts[0].resources.gpus)
    assert sampler_pid(bench) == 0
    assert bench.gpu(0).temperature_celsius is None


async def test_a_witness_asks_no_driver_and_offers_neither_gpus_nor_cores_nor_memory(nvml, start):
    bench = await start(witness=True)
    await bench.rounds(2)
    assert {post.resources for post in bench.posts} == {NodeResources((), 0, 0)}
    assert (sampler_pid(bench), nvml.calls) == (0, 0)
    assert (bench.snapshot.state, bench.snapshot.age_s) == (TelemetryState.OK, 0.0)
    assert "witness" in bench.snapshot.sentence
    assert bench.snapshot.host.cpu_count >= 1, "what its machine has is shown all the same"
