"""One readable log out of many services."""

import io
import os

from tevatron.core.cli.stack.console import Console, render


def test_json_line_becomes_message_and_extra_fields():
    line = '{"time": "t", "level": "info", "service": "api", "logger": "x", "message": "up", "port": 80}'
    assert render(line) == ("up  port=80", "info")


def test_warning_says_so():
    assert render('{"level": "warning", "message": "slow"}') == ("warning: slow", "warning")


def test_answered_look_is_not_shown_and_a_refused_one_is():
    line = '{{"level": "info", "message": "GET /v1/jobs -> {0}", "status": {0}}}'
    assert render(line.format(200)) == ("", "info")
    assert render(line.format(404)) == ("GET /v1/jobs -> 404  status=404", "info")


def test_exception_stays_readable():
    assert render('{"level": "error", "message": "no", "exception": "Traceback\\n  x"}') == (
        "error: no\nTraceback\n  x",
        "error",
    )


def test_other_lines_stay_as_they_are():
    assert render("LOG:  database system is ready") == ("LOG:  database system is ready", "info")
    assert render("{not json") == ("{not json", "info")


def test_output_goes_whole_to_the_file_and_short_to_the_stream(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path, stream=stream)
    read, write = os.pipe()
    os.write(write, b'{"level": "info", "message": "hello", "job_id": "j"}\nplain \xff\n')
    os.close(write)
    console.follow("api", os.fdopen(read, "rb")).join()
    assert (tmp_path / "api.log").read_bytes() == (
        b'{"level": "info", "message": "hello", "job_id": "j"}\nplain \xff\n'
    )
    shown = [line[9:] for line in stream.getvalue().splitlines()]
    assert shown == ["api        hello  job_id=j", "api        plain \ufffd"]


def test_lost_terminal_does_not_stop_the_files(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path, stream=stream)
    stream.close()
    read, write = os.pipe()
    os.write(write, b"one\ntwo\n")
    os.close(write)
    console.follow("api", os.fdopen(read, "rb")).join()
    assert (tmp_path / "api.log").read_bytes() == b"one\ntwo\n"


def test_large_log_is_set_aside_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tevatron.core.cli.stack.console.MAX_LOG_BYTES", 3)
    (tmp_path / "api.log").write_text("older\n")
    read, write = os.pipe()
    os.write(write, b"new\n")
    os.close(write)
    Console(tmp_path, stream=io.StringIO()).follow("api", os.fdopen(read, "rb")).join()
    assert (tmp_path / "api.log").read_text() == "new\n"
    assert (tmp_path / "api.log.1").read_text() == "older\n"
