"""What a process prints while it works is in its log, too."""

import sys
import threading

from rlcli.observe.run_logs import PrintedLog, run_logs


def test_a_log_has_what_is_printed_meanwhile_by_any_thread(tmp_path, capsys):
    log, is_inside, may_end = (
        PrintedLog(tmp_path / "logs/rank0.log"),
        threading.Event(),
        threading.Event(),
    )

    def work():
        with log.copying():
            is_inside.set()
            may_end.wait()
            print("second")

    before, thread = (sys.stdout, sys.stderr), threading.Thread(target=work)
    print("before")
    assert run_logs(tmp_path) == {}
    thread.start()
    is_inside.wait()
    with log.copying():
        print("first", file=sys.stderr)
    may_end.set()
    thread.join()
    print("after")
    assert (sys.stdout, sys.stderr) == before
    assert (tmp_path / "logs/rank0.log").read_text() == "first\nsecond\n"
    assert capsys.readouterr() == ("before\nsecond\nafter\n", "first\n")


def test_a_log_that_cannot_be_written_costs_nothing_else(tmp_path, capsys):
    (tmp_path / "logs").write_text("not a folder")
    with PrintedLog(tmp_path / "logs/rank0.log").copying():
        print("said")
    assert capsys.readouterr().out == "said\n"
