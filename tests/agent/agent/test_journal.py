import json
import logging
import sys

from aiohttp.http_exceptions import BadHttpMessage

from swarm_agent import journal
from swarm_agent.journal import FIELDS, JsonLines, TextLines, set_up_logging


def record(message: str, severity: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("swarm.agent", severity, __file__, 1, message, (), None)
    made.created = 1_700_000_000.25
    setattr(made, FIELDS, fields)
    return made


def test_text_is_one_line_with_fields_as_key_value() -> None:
    line = TextLines(is_journal=False).format(record("job.started: go\nnow", job="j1", text='two "words"', empty=""))

    assert line == (
        '2023-11-14T22:13:20.250Z INFO swarm.agent job.started: go\\nnow job=j1 text="two \\"words\\"" empty=""'
    )


def test_the_journal_gets_a_priority_and_no_time() -> None:
    assert TextLines(is_journal=True).format(record("bad", logging.ERROR)) == "<3>ERROR swarm.agent bad"


def test_json_is_one_object_a_line_with_the_traceback_inside() -> None:
    made = record("it broke", logging.ERROR, job="j1", level="not overwritten")
    try:
        raise ValueError("deep")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonLines("n1").format(made)

    assert "\n" not in line
    document = json.loads(line)
    assert "ValueError: deep" in document.pop("traceback")
    assert document == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "error",
        "node": "n1",
        "logger": "swarm.agent",
        "message": "it broke",
        "job": "j1",
    }


def test_what_is_no_http_is_not_logged_and_a_fault_of_ours_is(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    set_up_logging("text", "info", "n1")
    served = logging.getLogger("aiohttp.server")
    served.error("Error handling request from %s", "10.9.9.9", exc_info=BadHttpMessage("a NUL in a header"))
    served.error("Error handling request from %s", "10.9.9.9", exc_info=ValueError("ours"))
    logging.captureWarnings(capture=False)

    assert "ValueError: ours" in (said := capsys.readouterr().err)
    assert "NUL" not in said


def test_what_repeats_itself_is_told_some_times_a_minute_and_all_else_always(capsys, monkeypatch):
    root, clock = logging.getLogger(), [0.0]
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(journal.Repeats.__init__, "__defaults__", (lambda: clock[0],))
    set_up_logging("text", "info", "n1")
    logging.captureWarnings(capture=False)
    log = logging.getLogger("swarm.driver")

    def told() -> dict[str, int]:
        for number in range(500):
            log.error("effect failed effect=%s", f"e{number}", exc_info=ValueError("wide"))
            log.warning("not committed name=%s", number)
            log.info("job %d began", number)
        log.error("disk full")
        said = capsys.readouterr().err
        words = (
            "ERROR swarm.driver effect failed",
            "ValueError: wide",
            "not committed",
            "began",
            "disk full",
            "further",
        )
        return {word: said.count(word) for word in words}

    usual = {"ERROR swarm.driver effect failed": 3, "ValueError: wide": 3, "not committed": 100, "began": 500}
    usual |= {"disk full": 1, "further": 2}
    assert told() == usual
    clock[0] = 59.0
    assert told()["ValueError: wide"] == 0
    clock[0] = 61.0
    assert told() == usual
