"""What monitors and browsers ask for."""

import base64
import hashlib
import re

from swarm_agent.http import health
from swarm_agent.readiness import Check


async def test_readyz_follows_the_checks_and_livez_does_not(n1):
    n1.agent.readiness.add("disk", lambda: Check("disk", is_ok=False, detail="/secret/path is full"))
    for path in ("/readyz", "/healthz"):
        response = await n1.client.get(path)
        assert (response.status, await response.text()) == (503, "not ready\n")
    assert (await n1.client.get("/livez")).status == 200


async def test_verbose_names_the_checks_without_their_details(n1):
    n1.agent.readiness.add("disk", lambda: Check("disk", is_ok=False, detail="/secret/path is full"))
    text = await (await n1.client.get("/readyz?verbose")).text()
    assert text == "[+]membership ok\n[-]disk failed\nnot ready\n"


async def test_an_excluded_check_does_not_count(n1):
    n1.agent.readiness.add("disk", lambda: Check("disk", is_ok=False))
    assert (await n1.client.get("/readyz?exclude=disk")).status == 200


async def test_the_doctor_tells_details_and_remedies(n1):
    n1.agent.readiness.add("disk", lambda: Check("disk", is_ok=False, detail="full", remedy="free space"))
    items = {each["name"]: each for each in (await n1.get("/v1/doctor"))["items"]}
    assert (items["disk"]["status"], items["disk"]["remedy"]) == ("failed", "free space")
    assert items["members"]["status"] == "ok"


async def test_the_doctor_lists_a_check_once_though_readiness_has_one_of_that_name(n1):
    n1.agent.readiness.add("disk_space", lambda: Check("disk_space", is_ok=True, detail="enough"))
    found = [each for each in (await n1.get("/v1/doctor"))["items"] if each["name"] == "disk_space"]
    assert [each["detail"] for each in found] == ["100 GiB free"]


async def test_the_doctor_says_how_a_member_is_forgotten(n1, n2, swarm):
    swarm.statuses["n2"] = "failed"
    items = {each["name"]: each for each in (await n1.get("/v1/doctor"))["items"]}
    assert items["members"]["detail"] == "not alive: n2"
    assert items["members"]["remedy"] == "check these nodes, or, if they are gone for good: swarm forget NODE"


async def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(n1):
    response = await n1.client.get("/")
    page, policy = await response.text(), response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert " style=" not in page
    assert not re.search(r"\son\w+=", page)


async def test_the_page_puts_no_markup_from_the_swarm_into_itself(n1):
    page = await (await n1.client.get("/")).text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)


async def test_a_machine_without_gpus_is_not_warned_about_and_one_without_a_driver_is(n1, tmp_path, monkeypatch):
    async def status():
        return {each["name"]: each["status"] for each in (await n1.get("/v1/doctor"))["items"]}["gpu_readings"]

    monkeypatch.setattr(n1.agent, "telemetry", lambda: ("absent", "no NVIDIA driver"))
    monkeypatch.setattr(health, "PCI_DEVICES", tmp_path)
    for name, vendor, kind in (("net", "0x10de", "0x020000"), ("other", "0x1002", "0x030000"), ("torn", "", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert await status() == "ok"
    (tmp_path / "other" / "vendor").write_text("0x10de\n")
    assert await status() == "warning"
