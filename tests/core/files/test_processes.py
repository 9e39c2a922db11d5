"""Helper processes are ended with all their children, and their ends are described."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mlxtune.backend.text import template_helper
from mlxtune.benchmark import bench
from mlxtune.core.files import limited_helper
from mlxtune.core.files.processes import (
    HelperError,
    Helpers,
    LimitedProcess,
    ProcessEndedError,
    describe_end,
    end,
    own_environment,
    python,
    start,
)
from mlxtune.core.files.writing import as_output_error
from tests.slow import long, slow
from tests.sources import PACKAGE
from tests.waiting import SECONDS, wait_until

SLEEPING = "import time; time.sleep(60)"


def alive(process: int) -> bool:
    """Return whether a process runs, being neither gone nor a zombie."""
    command = ["ps", "-o", "stat=", "-p", str(process)]
    try:
        if Path("/proc/self").is_dir():
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        else:
            state = subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return False
    return bool(state) and "Z" not in state


def test_status_and_last_message_come_from_the_process(tmp_path: Path) -> None:
    code = "import sys; print('first', file=sys.stderr); print('last\\n', file=sys.stderr)"
    folder = tmp_path / "run"
    assert Helpers(tmp_path).call(["-c", f"{code}; sys.exit(3)"], folder) == 3
    assert describe_end(3, folder) == "exit code 3: last"
    assert Helpers(tmp_path).call(["-c", "import os; os.abort()"], folder) == -6
    assert describe_end(-6, folder).startswith("killed by signal 6")


def test_process_imports_this_package_and_keeps_its_files_to_the_folder(tmp_path: Path) -> None:
    code = "import mlxtune, tempfile; open('made', 'w'); print(mlxtune, tempfile.gettempdir())"
    assert Helpers(tmp_path).call(["-c", code], tmp_path / "run") == 0
    assert (tmp_path / "run" / "made").exists()
    package, temporary = (tmp_path / "run" / "stdout").read_text().rsplit(" ", 1)
    assert str(Path(__file__).parents[3]) in package
    assert temporary.strip() == str(tmp_path)


def test_signal_is_sent_once_the_moment_has_come(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = f"open('begun', 'w'); {SLEEPING}"
    status = Helpers(tmp_path).call(["-c", code], folder, until=(folder / "begun").exists)
    assert status == -signal.SIGKILL


def test_process_without_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HelperError, match="did not end within 0 seconds"):
        Helpers(tmp_path, limit=0.1).call(["-c", SLEEPING], tmp_path / "run")


def test_interrupt_ends_the_process_and_its_children(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = (
        "import os, subprocess, sys, time\n"
        f"below = subprocess.Popen([sys.executable, '-c', {SLEEPING!r}])\n"
        "open('tmp', 'w').write(f'{os.getpid()} {below.pid}')\n"
        "os.rename('tmp', 'begun')\n"
        "time.sleep(60)"
    )

    def interrupt() -> bool:
        if (folder / "begun").exists():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        Helpers(tmp_path).call(["-c", code], folder, until=interrupt)
    processes = [int(each) for each in (folder / "begun").read_text().split()]
    assert len(processes) == 2
    wait_until(lambda: not any(map(alive, processes)))
    assert os.getpid() not in processes


def test_limited_process_and_forks_end_with_busy_parent(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "def prepare(): pass\n"
        "def serve(prepared):\n"
        "    import os, time\n"
        "    if (new := os.fork()) == 0: time.sleep(600)\n"
        "    print(new, flush=True)\n"
        "    while True: pass\n"
    )
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mlxtune.core.files.processes import LimitedProcess\n"
        "child = LimitedProcess(Path(sys.argv[1]), 2**30)\n"
        "print(child.pid, int(child.read_line(100)), flush=True)\n"
        "os._exit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, script], stdout=subprocess.PIPE, check=False)
    processes = list(map(int, done.stdout.split()))
    wait_until(lambda: not any(map(alive, processes)))


# Files that a downloaded folder may have: each says that it ran.
HOSTILE = ("mlxtune/__init__.py", "click.py", "numpy.py", "json.py", "mlx/__init__.py", "rich.py")


@pytest.mark.parametrize(
    "command",
    [
        python("-m", "mlxtune", "watch", "--help"),
        slow(python("-m", "mlxtune.watch.answer_helper", "no json")),
        long(bench.helper_command(Path("missing"))),
        long(python("-m", "mlxtune.backend.device.device_helper", "--help")),
        python(limited_helper.__file__, "1000000", template_helper.__file__),
    ],
    ids=["page", "question", "bench", "device", "limited"],
)
def test_process_imports_nothing_of_the_current_folder(tmp_path: Path, command: list[str]) -> None:
    for name in HOSTILE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("open('ran', 'w')\n")
    process = start(command, folder=tmp_path, environment=own_environment())
    process.wait(SECONDS)
    end(process)
    assert not (tmp_path / "ran").exists()


def test_python_is_started_in_one_place() -> None:
    """The function that knows how: others would import from the current folder."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "sys.executable" in path.read_text(encoding="utf-8")
    }
    assert found == {"core/files/processes.py"}
    assert (PACKAGE / "core/files/processes.py").read_text().count("sys.executable") == 1


def test_process_that_cannot_start_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to a folder meanwhile must not take it for an error of the folder."""

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess.Popen", fail)
    with (
        pytest.raises(HelperError, match=r"^a helper process cannot be started: .*ulimit -u$"),
        as_output_error(tmp_path, "--cache-dir"),
    ):
        LimitedProcess(tmp_path / "script.py", 2**30)


def write_script(folder: Path, serve: str) -> Path:
    """Write a script of LimitedProcess, whose `serve` has the given lines."""
    lines = "".join(f"    {line}\n" for line in serve.splitlines())
    script = folder / "script.py"
    imports = "import os, subprocess, sys, time\n"
    script.write_text(f"{imports}def prepare(): return os.dup(2)\ndef serve(stderr):\n{lines}")
    return script


def test_reading_times_out_despite_endless_output(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, "while True: os.write(stderr, b'x' * 10_000)")
    printed: list[bytes] = []
    with closing(LimitedProcess(script, 2**30, on_message=printed.append)) as process:
        with pytest.raises(ProcessEndedError) as ended:
            process.read_line(100, sending=b"x" * 2**20, seconds=1)
        assert ended.value.reason == "time"
    assert set(printed[0]) == set(b"x")


def test_process_end_is_seen_despite_open_descendant_pipe(
    tmp_path: Path,
) -> None:
    serve = "if os.fork():\n    os.write(stderr, b'last words')\n    os._exit(7)\ntime.sleep(60)"
    printed: list[bytes] = []
    script = write_script(tmp_path, serve)
    with closing(LimitedProcess(script, 2**30, on_message=printed.append)) as process:
        with pytest.raises(ProcessEndedError) as ended:
            process.read_line(100)
        assert ended.value.reason == "exit status 7"
    assert b"".join(printed) == b"last words"


@pytest.mark.slow
def test_process_that_closes_its_output_and_stays_is_not_awaited(tmp_path: Path) -> None:
    script = write_script(tmp_path, "os.close(1)\ntime.sleep(60)")
    with closing(LimitedProcess(script, 2**30)) as process:
        with pytest.raises(ProcessEndedError) as ended:
            process.read_line(100)
        assert ended.value.reason == "closed"


def test_daemon_of_user_code_ends_with_its_process(tmp_path: Path) -> None:
    serve = (
        "command = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(subprocess.Popen(command, start_new_session=True).pid, flush=True)\n"
        "time.sleep(60)"
    )
    script = write_script(tmp_path, serve)
    with closing(LimitedProcess(script, 2**30, on_message=lambda message: None)) as process:
        daemon = int(process.read_line(100))
        assert alive(daemon)
    wait_until(lambda: not alive(daemon))
