"""Liveness, readiness, the doctor's checks, metrics and the explanations of errors."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from swarm_agent.doctor import Diagnosis
from swarm_agent.http.exchange import Call, HttpReply, answer
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.parameter import flag, words
from swarm_agent.http.port import AgentPort
from swarm_agent.http.problem import KINDS, Problem
from swarm_agent.metrics import render_jobs
from swarm_agent.security import job_user_warning
from swarmsched.documents import CheckDocument, DoctorDocument
from swarmsched.gossip.member import MemberStatus

RenderMetrics = Callable[[str], tuple[bytes, str]]
"""The page of metrics, and its content type, for an Accept header."""

TEXT_TYPE = "text/plain; charset=utf-8"

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"

EXCLUDE = words("exclude", "Checks to leave out, with commas.")
VERBOSE = flag("verbose", "One line for each check.")


class Health:
    """Handlers outside /v1, and GET /v1/doctor."""

    def __init__(self, agent: AgentPort, facts: AgentFacts, render_metrics: RenderMetrics) -> None:
        self._agent, self._facts, self._render_metrics = agent, facts, render_metrics

    async def livez(self, _: Call) -> HttpReply:
        """The event loop turns; nothing else is checked."""
        return HttpReply(200, b"ok\n", TEXT_TYPE)

    async def readyz(self, call: Call) -> HttpReply:
        """200 when every check holds.  Names of checks may be seen without a token, details may not."""
        checks = self._agent.readiness.checks(frozenset(EXCLUDE.of(call)))
        is_ready = all(check.is_ok for check in checks)
        lines = [f"[{'+' if check.is_ok else '-'}]{check.name} {'ok' if check.is_ok else 'failed'}" for check in checks]
        word = "ok" if is_ready else "not ready"
        text = "\n".join([*lines, word]) if VERBOSE.of(call) else word
        return HttpReply(200 if is_ready else 503, f"{text}\n".encode(), TEXT_TYPE)

    async def doctor(self, _: Call) -> HttpReply:
        """What this agent can say about its own state, with remedies."""
        found = [self._telemetry(), self._members(), self._holders(), self._isolation(), *self._facts.diagnoses()]
        names = {each.name for each in found}  # of which more can be said than whether work may come
        rest = [each for each in self._agent.readiness.checks() if each.name not in names]
        ready = [Diagnosis(each.name, "ok" if each.is_ok else "failed", each.detail, each.remedy) for each in rest]
        checks = [CheckDocument(**asdict(each)) for each in (*ready, *found)]
        return answer(DoctorDocument(items=checks, node=self._agent.config.name))

    async def metrics(self, call: Call) -> HttpReply:
        """Prometheus text, or OpenMetrics when asked for."""
        body, content_type = self._render_metrics(call.headers.get("accept", ""))
        return HttpReply(200, body, content_type)

    async def job_metrics(self, call: Call) -> HttpReply:
        """As `metrics`, of the tasks of this node."""
        body, content_type = render_jobs(self._facts.reported(), call.headers.get("accept", ""))
        return HttpReply(200, body, content_type)

    async def explain_error(self, call: Call) -> HttpReply:
        """What a kind of problem means."""
        code = call.params["code"]
        if code not in KINDS:
            raise Problem("not_found", f"there is no kind of error {code[:60]!r}")
        kind = KINDS[code]
        text = f"{kind.title} ({code}, status {kind.status})\n\n{kind.explanation}\n"
        return HttpReply(200, text.encode(), TEXT_TYPE)

    def _telemetry(self) -> Diagnosis:
        if self._agent.config.witness:
            return Diagnosis("gpu_readings", "ok", "a witness offers no GPUs")
        state, sentence = self._facts.telemetry()
        if state == "absent" and not has_nvidia_device(PCI_DEVICES):
            return Diagnosis("gpu_readings", "ok", "this machine has no NVIDIA GPU, and offers none")
        status = {"ok": "ok", "absent": "warning", "starting": "warning"}.get(state, "failed")
        return Diagnosis("gpu_readings", status, sentence, "" if status == "ok" else "run nvidia-smi on this node")

    def _members(self) -> Diagnosis:
        fine = (MemberStatus.ALIVE, MemberStatus.LEFT)
        away = [each.node_id for each in self._facts.members() if each.status not in fine]
        if not away:
            return Diagnosis("members", "ok", "every known member is alive")
        remedy = "check these nodes, or, if they are gone for good: swarm forget NODE"
        return Diagnosis("members", "warning", f"not alive: {', '.join(away)}", remedy)

    def _holders(self) -> Diagnosis:
        """Two cannot tell a dead neighbour from a cut cable; a third, however small, can."""
        alive = sum(each.is_available for each in self._facts.members())
        if alive > 2:
            return Diagnosis("holders", "ok", f"{alive} members are alive: a job outlives any one of them")
        if alive < 2:
            return Diagnosis("holders", "ok", "no other member is alive: jobs are as durable as this machine")
        detail = "two members are alive: when one dies, nothing is decided about the jobs that both hold"
        remedy = "bring the others back, or start a third agent on any small machine: swarm-agent --witness"
        return Diagnosis("holders", "warning", detail, remedy)

    def _isolation(self) -> Diagnosis:
        warning = job_user_warning(self._agent.config)
        fine = "a witness runs no jobs" if self._agent.config.witness else "jobs run under their own account"
        return Diagnosis("job_user", "warning" if warning else "ok", warning or fine)


def has_nvidia_device(devices: Path) -> bool:
    """Whether there is hardware that a driver is missing for; `devices` is a folder like the kernel's for PCI."""
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASS):
            return True
    return False
