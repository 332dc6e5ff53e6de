"""Problems: every error answer of the API, as RFC 9457 documents with a stable `code` and an explanation.

`KINDS` is the whole list; `/errors/CODE` serves it and a test holds docs/reference/errors.md to it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from swarmsched.api import KEY_SHOWN, PROBLEMS_LIMIT, nearest
from swarmsched.commands import Refused
from swarmsched.errors import FieldProblem, JobRejected, SwarmError

CONTENT_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of error: its HTTP status, a title that is the same for all cases, and what to do about it."""

    status: int
    title: str
    explanation: str


KINDS: dict[str, Kind] = {
    "bad_json": Kind(400, "The body is not JSON", "Send one JSON document in UTF-8, as an object."),
    "bad_parameter": Kind(400, "A query parameter cannot be used", "`errors` names the parameter and what it accepts."),
    "bad_request": Kind(400, "The request is not well formed", "Check method, headers and body against /openapi.json."),
    "unauthorised": Kind(401, "A bearer token is needed",
        "Give the swarm's token: `swarm login HOST --token-file FILE`, or the header `Authorization: Bearer TOKEN`."),
    "forbidden": Kind(403, "A right is missing",
        "`detail` names the right; ask whoever runs the swarm for it, or for somebody who has it."),
    "wrong_host": Kind(403, "This agent is not known under that host name",
        "Use the agent's address or node name, or add the name to `allowed_hosts` in the agent's configuration. "
        "The check keeps web pages from reaching the agent through names that they control."),
    "cross_origin": Kind(403, "Requests from other web sites are refused",
        "Call the API from a program, or open the agent's own page."),
    "not_found": Kind(404, "There is no such thing", "Check the path; /openapi.json lists all of them."),
    "unknown_job": Kind(404, "There is no such job",
        "`swarm ps -a` lists the jobs that are known."),
    "unknown_node": Kind(404, "There is no such node", "`swarm nodes` lists the members."),
    "unknown_blob": Kind(404, "This agent does not have that blob", "Upload it with PUT /v1/blobs/SHA256."),
    "method_not_allowed": Kind(405, "The path does not take this method", "The `Allow` header lists those it takes."),
    "request_timeout": Kind(408, "The body did not come in time",
        "Send it without long breaks; a Content-Length must be that of the body."),
    "ambiguous_job": Kind(409, "More than one job matches", "`matches` lists them; give more characters of the id."),
    "conflict": Kind(409, "The state does not allow this",
        "`detail` says what stands against it; look at its state again first."),
    "idempotency_in_progress": Kind(409, "The first request with this key is under way",
        "Wait a moment and repeat it with the same key."),
    "job_over": Kind(410, "The job has ended, and its record is no longer kept",
        "`swarm ps -a` lists the ended jobs that are still known. For another run of it, submit it anew."),
    "version_conflict": Kind(412, "Someone else changed it first",
        "Read it again, and send its new ETag in `If-Match`."),
    "too_large": Kind(413, "The body is too large", "JSON may have 1 MiB; put data into files and ship those."),
    "unsupported_media_type": Kind(415, "The body has the wrong type", "Send the Content-Type that the route names."),
    "unknown_expectation": Kind(417, "The request expects what no agent does",
        "Leave the header Expect out, or send `100-continue`."),
    "wrong_door": Kind(421, "The API is served at another address of this agent",
        "`detail` names the address; `listen` is for agents alone where `people_listen` is set."),
    "unknown_parameter": Kind(422, "The route does not take that query parameter",
        "`errors` names it and those that it takes."),
    "unknown_field": Kind(422, "There is no such field", "`errors` names it and those that there are."),
    "invalid": Kind(422, "The request has mistakes", "`errors` lists each with a pointer into the body and a remedy."),
    "impossible_request": Kind(422, "The swarm never had that",
        "Ask for less, or correct the names; `swarm nodes` shows what there is."),
    "bad_blob": Kind(422, "The content does not match its digest", "Send the bytes again; the file may have changed."),
    "idempotency_key_reused": Kind(422, "The key was used for another request",
        "Make a new Idempotency-Key for every new job."),
    "too_many_streams": Kind(429, "Too many streams are open at this agent", "Close some, or ask another agent."),
    "too_many_requests": Kind(429, "Too much is under way at this agent", "Wait as long as Retry-After says."),
    "internal": Kind(500, "The agent made a mistake", "The agent's log has the details under this request id."),
    "not_ready": Kind(503, "The agent cannot do this yet", "Wait as long as Retry-After says, or ask another agent."),
    "unavailable": Kind(503, "The outcome is unknown",
        "Repeat the request with the same ticket; it will not be done twice."),
    "shepherd_unreachable": Kind(503, "The agent that acts for this job does not answer",
        "Nothing was changed. A new shepherd acts within 20 s of the death of the old one; try again in a moment."),
    "storage_full": Kind(507, "The agent's disk takes no more", "Free space on that node, or ask another agent."),
}  # fmt: skip

REFUSED_CODES = {"not_found": "unknown_job", "over": "job_over", "impossible": "impossible_request"}
"""Those of the core that have another name here."""

DEFAULT_RETRY_AFTER_S = 1


class Problem(SwarmError):
    """An error answer.  `extra` adds members such as `matches`."""

    def __init__(
        self,
        code: str,
        detail: str,
        remedy: str = "",
        errors: Sequence[FieldProblem] = (),
        *,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(detail)
        self.code, self.detail, self.remedy, self.errors = code, detail, remedy, errors
        self.extra, self.headers, self.retry_after_s = extra or {}, headers or {}, retry_after_s

    @property
    def status(self) -> int:
        """HTTP status of the kind."""
        return KINDS[self.code].status

    def document(self, request_id: str) -> dict[str, Any]:
        """The members of the answer."""
        kind = KINDS[self.code]
        result: dict[str, Any] = {
            "type": f"/errors/{self.code}",
            "title": kind.title,
            "status": kind.status,
            "detail": self.detail,
            "instance": request_id,
            "code": self.code,
            "remedy": self.remedy or kind.explanation,
            **self.extra,
        }
        if self.errors:
            result["errors"] = [
                {"pointer": each.pointer, "detail": each.problem, "remedy": each.remedy} for each in self.errors
            ]
        if self.wait_s:
            result["retry_after_seconds"] = self.wait_s
        return result

    @property
    def wait_s(self) -> int:
        """Seconds for Retry-After; 0: none."""
        return self.retry_after_s or (DEFAULT_RETRY_AFTER_S if self.status in (429, 503) else 0)

    def all_headers(self) -> dict[str, str]:
        """Headers that belong to the answer."""
        return {**self.headers, **({"Retry-After": str(self.wait_s)} if self.wait_s else {})}

    def encode(self, request_id: str) -> bytes:
        """The body."""
        return json.dumps(self.document(request_id), ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )


def from_rejection(error: JobRejected, prefix: str = "") -> Problem:
    """A specification with mistakes; pointers get the place of the specification in the body put before them."""
    fields = tuple(FieldProblem(prefix + each.pointer, each.problem, each.remedy) for each in error.problems)
    return Problem("invalid", str(error), errors=fields)


def from_refusal(refused: Refused, prefix: str = "") -> Problem:
    """The core's no."""
    fields = tuple(FieldProblem(prefix + each.pointer, each.problem, each.remedy) for each in refused.fields)
    code = REFUSED_CODES.get(refused.code, refused.code)
    return Problem(code if code in KINDS else "conflict", refused.problem, refused.remedy, fields)


def invalid(pointer: str, problem: str, remedy: str) -> Problem:
    """One thing wrong with a body, at a JSON pointer."""
    where = FieldProblem(pointer, problem, remedy)
    return Problem("invalid", f"{pointer[1:] or 'body'}: {problem}", remedy, (where,))


def bad_parameter(name: str, problem: str, remedy: str) -> Problem:
    """A query parameter that cannot be used."""
    return refused_parameters("bad_parameter", (FieldProblem(f"?{name}", problem, remedy),))


def refused_parameters(code: str, fields: Sequence[FieldProblem]) -> Problem:
    """Query parameters with mistakes; those of a request are refused together."""
    detail = "; ".join(f"{each.pointer[1:]}: {each.problem}" for each in fields)
    remedies = {each.remedy for each in fields}
    return Problem(code, detail, remedies.pop() if len(remedies) == 1 else "each of `errors` has its own", fields)


def refuse_unknown(
    names: Iterable[str],
    known: Sequence[str],
    code: str = "invalid",
    mark: str = "/",
    remedy: str = "remove it or correct the spelling",
) -> None:
    """Names of keys or (with the mark `?`) parameters: a misspelt one would otherwise be silently without effect."""
    what = "parameter" if mark == "?" else "key"
    wrong = [
        FieldProblem(f"{mark}{name[:KEY_SHOWN]}", f"unknown {what}{nearest(name, known)}", remedy)
        for name in islice((name for name in names if name not in known), PROBLEMS_LIMIT)
    ]
    if wrong:
        raise Problem(code, "; ".join(f"{each.pointer[1:]}: {each.problem}" for each in wrong), remedy, wrong)
