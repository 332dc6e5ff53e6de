"""`swarm simulate replay` with several policies, and the picture of them."""

import base64
import io
import json
import re
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest

from swarm_client import progress
from swarm_client.progress import Progress
from tests.client.test_replay import jobs, replay  # noqa: F401  # the fixture

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


def test_a_picture_that_could_not_be_drawn_is_refused_before_the_run(capsys, jobs, tmp_path, monkeypatch):  # noqa: F811
    for file, told in ((tmp_path / "p.jpg", "is no picture"), (tmp_path / "no" / "p.png", "there is no folder")):
        code, out, error = replay(capsys, str(jobs), "--plot", str(file))
        assert (code, out) == (2, "")
        assert told in error
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'swarmsched[plots]'" in replay(capsys, str(jobs), "--plot", str(tmp_path / "p.png"))[2]


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
        with Progress("las", terminal) as bar:
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
