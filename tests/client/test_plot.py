"""`swarm simulate replay` with several policies, and the picture of them."""

import base64
import io
import json
import os
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from swarm_client import progress
from swarm_client.progress import ProgressBar
from tests.client.test_replay import JOBS, jobs, replay  # noqa: F401  # the fixture

WORDS = ("--select", "cluster=x", "--tick-s", "0", "--rescale-cost-s", "0")


def test_several_policies_are_told_side_by_side_and_a_parameter_goes_to_those_that_have_it(capsys, jobs):  # noqa: F811
    words = [*WORDS, "--policy", "fifo, las", "--policy", "srsf", "--parameter", "minimum_run_s=0"]
    code, out, _ = replay(capsys, str(jobs), *words, "-o", "json")
    items = json.loads(out)["items"]
    assert code == 0
    assert [item["policy"].split(":")[0] for item in items] == ["fifo", "las", "srsf"]
    assert [item["finished"] for item in items] == [2, 2, 2]
    assert items[0]["policy"] == "fifo"
    assert items[1]["policy"] != "las"
    table = replay(capsys, str(jobs), *words)[1].splitlines()
    assert table[0].split()[:3] == ["POLICY", "FINISHED", "AVERAGE"]
    assert [line.split()[1] for line in table[1:]] == ["2/2"] * 3
    assert "has no parameter 'horizon_s'" in replay(capsys, str(jobs), *words, "--parameter", "horizon_s=9")[2]


@pytest.mark.parametrize("name", ["picture.svg", "picture.html", "picture.PNG"])
def test_a_picture_names_each_policy_and_its_axes_and_loads_nothing(capsys, jobs, tmp_path, name):  # noqa: F811
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    words = [*WORDS, "--policy", "fifo,las,srsf,srtf", "--plot", str(file)]
    assert replay(capsys, str(jobs), *words)[0] == 0
    data = file.read_bytes()
    if name.endswith("PNG"):
        assert data.startswith(b"\x89PNG")
        return
    if name.endswith("html"):
        assert not re.search(rb'(src|href)="(?!data:)', data)
        (source,) = re.findall(rb"base64,([^\"]+)", data)
        data = base64.b64decode(source)
    comments = re.findall(r"<!-- (.*?) -->", data.decode())  # what each text says, in front of its glyphs
    ElementTree.fromstring(data)
    for text in ("completion time (hours)", "time (hours)", "GPUs held", "Allocation, srtf", "GPUs that are up"):
        assert text in comments
    assert {"fifo", "las", "srsf", "srtf"} < set(comments)
    assert sum("mean" in text for text in comments) > 1


def test_a_picture_names_no_size_that_is_not_there_and_how_many_jobs_a_mean_is_of(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "t.csv", tmp_path / "p.svg"
    file.write_text("job_id,submit_time_s,num_gpus,duration_s\na,0,4,50\nb,0,80,50\n")
    code, _, error = replay(capsys, str(file), "--nodes", "2", "--policy", "fifo", "--plot", str(picture))
    assert (code, "b: needs 80 GPUs" in error) == (1, True)
    comments = re.findall(r"<!-- (.*?) -->", picture.read_text())
    assert [text for text in comments if text.startswith("held by")] == ["held by jobs of 2 to 4"]
    assert next(text for text in comments if "mean" in text).endswith(" h of 1 of 2 jobs")


def test_a_picture_that_could_not_be_drawn_is_refused_before_the_run(capsys, jobs, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "folder.png").mkdir()
    for file, told in (
        (tmp_path / "p.jpg", "is no picture"),
        (tmp_path / "no" / "p.png", "there is no folder"),
        (tmp_path / "folder.png", "is there, and no file"),
        (Path("/proc/p.png"), "--plot cannot be written: "),
        (tmp_path / f"{'p' * 300}.png", "--plot cannot be written: File name too long: "),
        (tmp_path / ("p" * 300) / "p.png", "--plot cannot be written: File name too long: "),
    ):
        code, out, error = replay(capsys, str(jobs), "--plot", str(file))
        assert (code, out) == (2, "")
        assert told in error
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'swarmsched[lab]'" in replay(capsys, str(jobs), "--plot", str(tmp_path / "p.png"))[2]


def test_a_picture_that_has_become_impossible_costs_no_result_and_dollars_are_no_formula(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "$x_{$.csv", tmp_path / "p.svg"
    file.write_text(JOBS)
    words = [str(file), *WORDS, "--policy", "fifo", "-o", "json", "--plot", str(picture)]
    code, out, _ = replay(capsys, *words)
    assert (code, json.loads(out)["finished"]) == (0, 2)
    drawn = picture.read_bytes()
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: os.write(os.open("/dev/full", os.O_WRONLY), data))
    code, out, error = replay(capsys, *words)
    assert (code, json.loads(out)["finished"], "No space left" in error) == (2, 2, True), error
    assert picture.read_bytes() == drawn


def test_where_nothing_ran_there_is_nothing_to_draw(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    lone = tmp_path / "lone.csv"
    lone.write_text("job_id,submit_time_s,num_gpus,duration_s\nc,0,80,5\n")
    code, _, error = replay(capsys, str(lone), "--tick-s", "0", "--plot", str(tmp_path / "p.svg"))
    assert code == 2
    assert "no time has passed" in error
    lone.write_text("job_id,submit_time_s,num_gpus\n")
    assert "has no jobs" in replay(capsys, str(lone))[2]


class Terminal(io.StringIO):
    """Keeps what it is told."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def test_a_bar_is_drawn_on_a_terminal_alone_not_too_often_and_gone_at_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = {}
    for is_terminal in (True, False):
        now[0] = 0.0
        terminal = Terminal(is_terminal=is_terminal)
        with ProgressBar("las", terminal) as bar:
            for step in range(1, 101):
                now[0] += 0.1
                bar.show(step / 100, f"{step} of 100 jobs")
        shown[is_terminal] = terminal.getvalue()
    assert shown[False] == ""
    lines = shown[True].split(progress.CLEAR_LINE)
    assert 20 < len(lines) < 60
    assert lines[1].startswith("las [###")
    assert "jobs, 8s left" in lines[1]
    assert lines[-1] == ""
