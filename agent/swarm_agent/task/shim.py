"""The small process between an agent and the ranks of one task; it outlives the agent.

Run as `python -I -S shim.py TASKDIR`, by the agent, in a session of its own.  It reads TASKDIR/launch, starts the
ranks, writes their output to log segments, appends what happens to TASKDIR/facts, and obeys TASKDIR/commands.  It is
a subreaper: whatever the ranks leave behind becomes its child, and it does not end before the last descendant has.
Run as `shim.py confine` it does the same, and nothing else, for one command: see there.
Run as `shim.py serve` it waits for the agent to name tasks and forks itself for each of them, see `serve`.
One that finds `warm` instead of a launch file waits for its task with a process that has done its imports: see `Warm`.

Files in TASKDIR (0700, the agent's):
    launch    written by the agent: strings separated by NUL, read by `Launch`
    facts     written here: one line per fact, appended; exits are on disk before anybody is told
    commands  a FIFO: `signal N`, `stop GRACE_S` and `lease` (look at that file now), a line each
    lease     written by the agent, rewritten in place: until when the ranks may run, see `read_lease`; may be missing
    lock      held (flock) as long as this process lives; inherited from the agent, so there is no gap
The agent is told of news by a line in the FIFO TASKDIR/../notify; when nobody listens the line is dropped, since all
news is in the files.

When the time of the lease is over and the file does not name a later one, the ranks and all their descendants are
frozen (SIGSTOP), whether an agent lives or not; they go on when it does name one.  So a node that is cut off stops
its part of a job by itself, before another may be started elsewhere.

One such process stands beside every task, so its size and start count: no import of json, socket, signal or enum
(each costs milliseconds and up to a megabyte), hence `_signal`, which the interpreter has loaded anyway.
"""

import _signal  # type: ignore[import-not-found]  # the C part of signal has no stub
import errno
import os
import select
import sys
import time

STDOUT, STDERR, SYSTEM = b"o", b"e", b"s"
LOST = b"[%d bytes of output were lost: the disk was full]\n"
HEADER_BYTES = 13  # kind (1), microseconds since 1970 (8), length (4), big endian
SEGMENT_SUFFIX = ".log"
READ_BYTES = 65_536
RECORD_BYTES_MAX = 2 * READ_BYTES  # what was held back of a line, and one read
TAIL_BYTES = 4_096
TAIL_SEGMENTS = 7  # of a log that is full, beside its head
READER_NAME = "reader"  # in the folder of a rank's log: what of it somebody still reads, see `reader_text`
FIRST_READER_S = 10.0  # after its first output, for a reader of a log to be there
CROWDED_INTERVAL_S = 0.02  # between two looks whether a reader has gone on
HOLD_S = 0.1  # a line that is written in several parts becomes one record, if the parts come within this time
NOTICE_INTERVAL_S = 0.02  # the first output of a quiet rank is told at once, later output at most this often
LEFTOVER_GRACE_S = 2.0
KILL_INTERVAL_S = 0.05
STUBBORN_S = 10.0
LEASE_BYTES = 64
LEASE_S_MAX = 1e12  # of two times so many digits there is room; anything later is never
LOOK_S = 0.5  # after the machine was asleep, its ranks run on for as long
FROZEN_INTERVAL_S = 0.5  # how often the lease and strays are looked for while frozen
FREEZE_PASSES = 8  # a process that forks while it is being stopped leaves a running child for the next pass
PORT_CONFLICT_S = 120.0  # rank 0 has imported its framework by then, also from a network file system
PORT_NAME = b"\0swarm-rendezvous-%d"  # held while a task may bind this port: see rendezvous.py
FACTS_BYTES_PER_RANK = 256
DRAIN_READS = 16  # a pipe holds at most 1 MiB; a daemon that writes on must not keep us
LAST_WORDS_ATTEMPTS = 600
LAUNCH_FORMAT = "1"
SPARE_FD = 100  # above what a forked shim keeps
INHERITED_FDS = (10, 11)  # the rendezvous socket and the lock, as the agent numbers them for us
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WARM_READY, WARM_STARTED = b"r", b"s"
WARM_ANSWER_MS = 1_000
STRAY_PASSES = 200  # a second; what starts processes faster than they are ended is not kept
FDS_LIMIT = 65_536
INFINITE = float("inf")
GROUP_SIGNALS = (1, 2, 3, 9, 15, 18, 19, 20)  # HUP INT QUIT KILL TERM CONT STOP TSTP: for everything a rank started
SIGTERM, SIGKILL, SIGCONT, SIGSTOP, SIGCHLD, SIGPIPE, SIGXFSZ = 15, 9, 18, 19, 17, 13, 25
CGROUPS = "/sys/fs/cgroup"
OWN_PID = "@PID@"  # in the order for the scope, which is written before there is a process
SCOPE_S = 5.0
SCOPE_INTERVAL_S = 0.005
NOT_RUNNING = b"TtZX"  # states of /proc/PID/stat: stopped, traced, zombie, dead


class LogWriter:
    """Append records to the segments of one rank's log; what does not fit in `limit_bytes` leaves the middle.

    A segment is named by two numbers, the position of its first byte in the whole log and the bytes of output before
    it, so a reader can tell how much is missing between two segments.  The first segment is the head and stays; of
    the others the oldest goes when the log is full, unless a reader still needs it: then the log is crowded, and the
    rank is not read until `make_room` succeeds.  A full disk costs output, never the job: what could not be written is
    counted and said when there is room again.
    """

    def __init__(self, directory: str, limit_bytes: int, head_bytes: int) -> None:
        self.directory = directory
        self.head_bytes = max(4_096, min(head_bytes, limit_bytes // 2))
        self.segment_bytes = max(4_096, (limit_bytes - self.head_bytes) // 8)
        self.lost_bytes = 0
        self.is_crowded = False
        self._begun_s = 0.0
        self._fd = -1
        self._start = self._size = self._payload = 0
        self._is_head = True

    def write(self, kind: bytes, data: bytes, utc_s: float | None = None) -> None:
        """Append one record, or several if it is larger than a segment takes; never raises OSError."""
        most = min(RECORD_BYTES_MAX, self.segment_bytes // 2)
        for offset in range(0, len(data), most):
            self._write(kind, data[offset : offset + most], time.time() if utc_s is None else utc_s)

    def _write(self, kind: bytes, data: bytes, utc_s: float) -> None:
        try:
            if self._fd < 0:
                self._open()
            self._tell_loss(utc_s)
            self._append(kind, data, utc_s)
        except OSError:
            self.lost_bytes += len(data)
            self._restore()

    def _tell_loss(self, utc_s: float) -> None:
        if self.lost_bytes:
            self._append(SYSTEM, LOST % self.lost_bytes, utc_s)
            self.lost_bytes = 0

    def close(self) -> None:
        """Close the current segment; a later write opens it again.

        What was lost and could not be said is told by the name of an empty segment, which needs no room.
        """
        if self._fd < 0:
            return
        try:
            self._tell_loss(time.time())
        except OSError:
            self._restore()
            self._leave_gap()
        self._let_go()

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _leave_gap(self) -> None:
        start, payload = self._start + self._size + self.lost_bytes, self._payload + self.lost_bytes
        path = segment_path(self.directory, start, payload)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            self.lost_bytes = 0
        except OSError:
            return

    def make_room(self) -> bool:
        """Drop what is too much and no reader needs; False while one needs the oldest of it."""
        try:
            known = segments(self.directory)
            needed = self._needed_from() if len(known) > 1 + TAIL_SEGMENTS else INFINITE
            self.is_crowded = False
            for (old, payload), (following, _) in zip(known[1:-TAIL_SEGMENTS], known[2:], strict=False):  # noqa: RUF007  # one import less
                if following > needed:
                    self.is_crowded = True
                    break
                os.unlink(segment_path(self.directory, old, payload))  # noqa: PTH108
        except OSError:
            self.is_crowded = False
        return not self.is_crowded

    def _needed_from(self) -> float:
        """The position behind which nothing may be dropped now."""
        position, _, until_s = read_twice(f"{self.directory}/{READER_NAME}").partition(b"@")
        try:
            return int(position, 16) if float(until_s) > now() else INFINITE
        except ValueError:  # no reader has come, its file is still empty, or this is none of our files
            return 0 if now() < self._begun_s + FIRST_READER_S else INFINITE

    def _append(self, kind: bytes, data: bytes, utc_s: float) -> None:
        limit = self.head_bytes if self._is_head else self.segment_bytes
        if self._size and self._size + HEADER_BYTES + len(data) > limit:
            self._rotate()
        stamp = int(utc_s * 1e6)
        frame = kind + stamp.to_bytes(8, "big") + len(data).to_bytes(4, "big") + data
        view = memoryview(frame)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size += len(frame)
        self._payload += len(data)

    def _restore(self) -> None:
        """Cut a half-written frame off, so that the log stays readable."""
        if self._fd >= 0:
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self._let_go()

    def _rotate(self) -> None:
        start = self._start + self._size
        fd = os.open(segment_path(self.directory, start, self._payload), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.close(self._fd)
        self._fd, self._start, self._size, self._is_head = fd, start, 0, False
        self.make_room()

    def _open(self) -> None:
        """Go on where an earlier writer stopped; a torn last frame is cut off."""
        os.makedirs(self.directory, 0o700, exist_ok=True)  # noqa: PTH103
        known = segments(self.directory) or [(0, 0)]
        start, payload = known[-1]
        fd = os.open(segment_path(self.directory, start, payload), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size, added = measure(fd)
        os.ftruncate(fd, size)
        self._fd, self._start, self._size, self._payload = fd, start, size, payload + added
        self._is_head = len(known) == 1 and start == 0
        self._begun_s = self._begun_s or now()


def segment_path(directory: str, start: int, payload: int) -> str:
    """Path of the segment that begins at position `start` after `payload` bytes of output."""
    return f"{directory}/{start:014x}-{payload:014x}{SEGMENT_SUFFIX}"


def segments(directory: str) -> list[tuple[int, int]]:
    """(start, payload) of all segments, in order."""
    found = []
    for name in os.listdir(directory):  # noqa: PTH208
        start, dash, rest = name.partition("-")
        if dash and rest.endswith(SEGMENT_SUFFIX):
            found.append((int(start, 16), int(rest[: -len(SEGMENT_SUFFIX)], 16)))
    return sorted(found)


def measure(fd: int) -> tuple[int, int]:
    """(bytes of whole frames, bytes of output in them) of a segment."""
    end = os.fstat(fd).st_size
    size = payload = 0
    while size + HEADER_BYTES <= end:
        header = os.pread(fd, HEADER_BYTES, size)
        length = int.from_bytes(header[9:], "big")
        if size + HEADER_BYTES + length > end:
            break
        size += HEADER_BYTES + length
        payload += length
    return size, payload


class Strings:
    """Strings separated by NUL, in a fixed sequence, lists led by their length."""

    def __init__(self, data: bytes) -> None:
        self._parts = iter(data.decode("utf-8", "surrogateescape").split("\0"))

    def text(self) -> str:
        """The next string."""
        return next(self._parts)

    def number(self) -> int:
        """The next string as a whole number."""
        return int(self.text())

    def many(self) -> list[str]:
        """The next list."""
        return [self.text() for _ in range(self.number())]


class Launch(Strings):
    """The agent's order."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        if self.text() != LAUNCH_FORMAT:
            raise ValueError("launch file of another format")
        self.task = self.text()
        self.log_dir = self.text()
        self.log_limit_bytes, self.log_head_bytes = self.number(), self.number()
        self.workdir = self.text()
        self.umask = self.number()
        self.uid, self.gid = self.number(), self.number()
        self.groups = [int(group) for group in self.many()]
        self.grace_s = float(self.text())
        self.listen_fd, self.port = self.number(), self.number()
        self.argv = self.many()
        common = self.many()
        self.ranks = [(self.number(), common + self.many()) for _ in range(self.number())]
        self.scope = self.many()
        self.warm_argv = self.many()  # what a process that waits for its task is to run; none: start one


class Rank:
    """One process and its output."""

    def __init__(self, rank: int, log: LogWriter) -> None:
        self.rank, self.log = rank, log
        self.pid = 0
        self.status: int | None = None  # exit code of a rank that never became the command
        self.tail = b""  # the last of stderr, to recognise well-known deaths
        self.pipes: dict[int, bytes] = {}  # fd -> kind
        self._parts: dict[bytes, tuple[float, bytes]] = {}  # kind -> until when (monotonic) this part of a line is held
        self.noticed_s = 0.0
        self.has_news = False
        self.is_running = False
        self.is_held = False  # its pipes are not looked at: somebody still reads what would have to be dropped

    def take(self, fd: int) -> bool:
        """Read once; False when nothing is there now."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            del self.pipes[fd]
            return False
        kind = self.pipes[fd]
        if kind == STDERR:
            self.tail = (self.tail + data)[-TAIL_BYTES:]
        self._write_lines(kind, data)
        return True

    def _write_lines(self, kind: bytes, data: bytes) -> None:
        """Hold the beginning of a line back for the rest of it; a progress bar (carriage return) goes on at once."""
        until_s, part = self._parts.pop(kind, (0.0, b""))
        data = part + data
        whole = data.rfind(b"\n") + 1
        if len(data) - whole >= READ_BYTES or b"\r" in data[whole:]:
            whole = len(data)
        if whole < len(data):
            is_older = until_s and not whole
            self._parts[kind] = (until_s if is_older else now() + HOLD_S, data[whole:])
        if whole:
            self.log.write(kind, data[:whole])
            self.has_news = True

    @property
    def release_at_s(self) -> float:
        """When `release` has something to do."""
        return min((until_s for until_s, _ in self._parts.values()), default=INFINITE)

    def release(self, now_s: float = INFINITE) -> None:
        """Write the parts of lines that were held for long enough."""
        for kind, (until_s, part) in [*self._parts.items()]:
            if until_s <= now_s:
                del self._parts[kind]
                self.log.write(kind, part)
                self.has_news = True

    def say(self, text: str) -> None:
        """A line of our own in the rank's log."""
        self.release()
        self.log.write(SYSTEM, text.encode("utf-8", "replace") + b"\n")
        self.has_news = True


NO_CONTROLS = bytes(code if code >= 32 and code != 127 else 32 for code in range(256))
"""Names and texts come from users: what they hold must not look like another line."""


class Facts:
    """The append-only record of what happened; room is reserved first, so that a full disk cannot swallow exits."""

    def __init__(self, path: str, ranks: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(self._fd, 0, 16_384 + FACTS_BYTES_PER_RANK * ranks)
        self._offset = 0
        self._pending = b""
        self._needs_sync = False

    @property
    def is_waiting(self) -> bool:
        """True while something is queued."""
        return bool(self._pending)

    def add(self, line: str, *, is_lasting: bool = True) -> None:
        """Queue a fact for the next `flush`."""
        self._pending += line.encode("utf-8", "replace").translate(NO_CONTROLS) + b"\n"
        self._needs_sync = self._needs_sync or is_lasting

    def flush(self) -> bool:
        """Write what is queued, synced if it must survive a power cut.  True when something was written."""
        if not self._pending:
            return False
        os.pwrite(self._fd, self._pending, self._offset)
        if self._needs_sync:
            os.fdatasync(self._fd)
        self._offset += len(self._pending)
        self._pending, self._needs_sync = b"", False
        return True


class Notices:
    """Lines to the agent, if one listens; kept and repeated only while its FIFO is full."""

    def __init__(self, path: str, task: str) -> None:
        self._path, self._task = path, task
        self._fd = -1
        self.waiting: list[str] = []

    def send(self, what: str) -> None:
        """Tell `what`; a listener that is not there will read the files when it comes."""
        if what not in self.waiting:
            self.waiting.append(what)
        self.retry()

    def retry(self) -> None:
        """Send what waits, as far as the FIFO takes it."""
        while self.waiting:
            try:
                if self._fd < 0:
                    self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(self._fd, f"{self._task} {self.waiting[0]}\n".encode())
            except BlockingIOError:
                return
            except OSError:  # nobody listens (ENXIO, EPIPE) or the FIFO is gone (ENOENT)
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1
                self.waiting.clear()
                return
            self.waiting.pop(0)


class Freezer:
    """Stops all descendants of this process and lets them go on, except those that were stopped by somebody else.

    The kernel does so for a control group, if they have one.  Otherwise each process is signalled on its own, never by
    its group: a process that is listed as running and was not stopped by us is then certainly new, so nothing escapes
    by forking.  Parents are stopped before their children are looked for, and go on after them, so that a shell with
    job control does not see its children stop.
    """

    def __init__(self) -> None:
        self.is_frozen = False
        self.group = ""  # the control group of all descendants
        self._stopped: set[int] = set()

    def freeze(self) -> None:
        """Stop what runs; cheap to repeat."""
        self.is_frozen = True
        if write_small(f"{self.group}/cgroup.freeze", b"1"):
            return
        for _ in range(FREEZE_PASSES):
            known = len(self._stopped)
            self._walk(is_stopping=True)
            if len(self._stopped) == known:
                return

    def claim(self) -> bool:
        """Let those go on as well, when the time comes, that somebody else had stopped; False: a signal does that."""
        if not self.is_frozen or self.group:
            return False
        self._stopped.update(self._walk())
        return True

    def thaw(self) -> None:
        """Let everything go on that `freeze` stopped."""
        write_small(f"{self.group}/cgroup.freeze", b"0")
        for pid in reversed(self._walk() if self._stopped else []):
            if pid in self._stopped:
                send(pid, SIGCONT)
        self._stopped.clear()
        self.is_frozen = False

    def _stop(self, pid: int) -> None:
        fields = read_stat(pid)
        if fields and fields[0] not in NOT_RUNNING:
            send(pid, SIGSTOP)
            self._stopped.add(pid)

    def _walk(self, *, is_stopping: bool = False) -> list[int]:
        """All descendants, parents first; with `is_stopping` each is stopped before its children are looked for.

        The kernel's own lists of children spare a look at every process of the machine, which takes long on a busy
        one, just when the time is over.  They are complete for a parent that is stopped.  Kernels without them
        (CONFIG_PROC_CHILDREN) are asked the long way.
        """
        has_lists = os.access(f"/proc/self/task/{os.getpid()}/children", os.F_OK)
        everybody = {} if has_lists else processes_by_parent()
        found: list[int] = []
        todo = [os.getpid()]
        while todo:
            parent = todo.pop()
            below = listed_children(parent) if has_lists else [pid for pid, _, _ in everybody.get(parent, ())]
            for pid in below:
                if is_stopping:
                    self._stop(pid)
            found += below
            todo += below
        return found


class Warm:
    """A process that does its imports before its task is known, as a child of the shim that will have the task.

    DIR/warm holds strings as a launch file does: uid, gid, groups, argv, environment, scope.  The process gets one
    argument more, a descriptor to which it writes `r` when it is ready; DIR/ready tells the agent.  The command `launch
    TASKDIR` gives us the task, when the agent has moved FIFO and lock there; until then we end with its fork server.

    What it imports may be a job's own code, and no job has booked it.  So it is in a scope of its own, stands still
    (SIGSTOP) once it is ready, and whatever it has started is ended: then, and with us.
    """

    def __init__(self, directory: str) -> None:
        self._dir = directory
        self._group = ""  # of its scope
        self.pid = 0
        self.out = self.err = self._told = self._request = -1

    def wait(self) -> str:
        """Start the process and wait; the folder of our task, or empty when there will be none."""
        server = os.getppid()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        _signal.signal(SIGTERM, lambda *_: self._end())
        prctl(PR_SET_PDEATHSIG, SIGTERM)
        if os.getppid() != server:  # it ended before we asked to be told
            return ""
        try:
            task_dir = self._wait()
        except BaseException:  # noqa: BLE001  # told as an interpreter would
            sys.excepthook(*sys.exc_info())
            task_dir = ""
        if not task_dir:
            self._end()
        prctl(PR_SET_PDEATHSIG, 0)
        _signal.signal(SIGTERM, _signal.SIG_DFL)
        return task_dir

    def _end(self) -> None:
        """End it and all that it has started, and then ourselves."""
        end_all_descendants()
        os._exit(0)

    def _wait(self) -> str:
        commands = os.open(f"{self._dir}/commands", os.O_RDWR | os.O_NONBLOCK)
        with open(f"{self._dir}/warm", "rb") as file:  # noqa: PTH123
            self._start(Strings(file.read()))
        events = select.poll()
        for fd in (commands, self._told):
            events.register(fd, select.POLLIN)
        while True:
            for fd, _ in events.poll():
                if fd == commands:
                    word, _, path = os.fsdecode(os.read(fd, 4_096)).strip().partition(" ")
                    os.close(commands)
                    return path if word == "launch" else ""
                if os.read(fd, 1) != WARM_READY:  # it has ended
                    os.write(2, os.read(self.err, TAIL_BYTES))
                    return ""
                if not self._stand_still():
                    os.write(2, b"its imports start processes without end\n")
                    return ""
                os.close(os.open(f"{self._dir}/ready", os.O_WRONLY | os.O_CREAT, 0o600))

    def _start(self, order: Strings) -> None:
        account = order.number(), order.number(), [int(group) for group in order.many()]
        argv, env, scope = order.many(), order.many(), order.many()
        if scope:
            self._group = enter_scope(scope)
        request, out, err, told = (os.pipe2(os.O_CLOEXEC) for _ in range(4))
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for source, target in ((request[0], 0), (out[1], 1), (err[1], 2)):
                    os.dup2(source, target)
                os.set_inheritable(told[1], True)
                for number in (SIGPIPE, SIGXFSZ):  # ignored ones would stay so after exec
                    _signal.signal(number, _signal.SIG_DFL)
                forget_protection()
                become(*account)
                prctl(PR_SET_PDEATHSIG, SIGKILL)  # of ours: what stands still reads no end of its input
                os.chdir("/")
                execute([*argv, str(told[1])], dict(entry.split("=", 1) for entry in env))
            except BaseException as error:  # noqa: BLE001  # nothing may return into the parent's code
                os.write(2, f"{argv[0]}: {error}\n".encode("utf-8", "replace"))
            finally:
                os._exit(127)
        for fd in (request[0], out[1], err[1], told[1]):
            os.close(fd)
        for fd in (request[1], err[0]):
            os.set_blocking(fd, False)
        self._request, self.out, self.err, self._told = request[1], out[0], err[0], told[0]

    @property
    def is_confined(self) -> bool:
        """True with a scope of its own."""
        return bool(self._group)

    def _stand_still(self) -> bool:
        """Stop it, and end what it has started; false where that has no end."""
        send(self.pid, SIGSTOP)
        for _ in range(STRAY_PASSES):
            strays = [pid for pid, _, state in descendants(os.getpid()) if pid != self.pid and state != b"Z"]
            if not strays:
                return True
            for pid in strays:
                send(pid, SIGKILL)
            time.sleep(SCOPE_INTERVAL_S)
        return False

    def become(self, order: Launch, env: list[str], group: str) -> bool:
        """Have it become the rank; false: it cannot, and has been ended.

        It reads umask, working directory, arguments and environment, and writes `s` when it begins with them.
        """
        parts = [str(order.umask), order.workdir, *counted(order.warm_argv), *counted(env)]
        data = "\0".join(parts).encode("utf-8", "surrogateescape")
        try:
            if group and not write_small(f"{group}/cgroup.procs", b"%d" % self.pid):
                raise OSError("its control group takes no process")
            if group and self._group:
                write_small(f"{self._group}/cgroup.kill", b"1")  # what has come since
            send(self.pid, SIGCONT)
            is_told = os.write(self._request, data) == len(data)  # it takes all, or is too small for it
            os.close(self._request)
            answer = select.poll()
            answer.register(self._told, select.POLLIN)
            if not is_told or not answer.poll(WARM_ANSWER_MS):
                raise OSError("what waited does not answer")
            if os.read(self._told, 1) == WARM_STARTED:
                os.close(self._told)
                return True
        except OSError as error:  # an ordinary start follows, and tells what is wrong if that fails too
            os.write(2, f"no warm start: {error}\n".encode())
        send(self.pid, SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in (self.out, self.err, self._told):
            os.close(fd)
        return False


def counted(items: list[str]) -> list[str]:
    """A list as `Strings.many` reads it."""
    return [str(len(items)), *items]


class Shim:
    """The loop: output, exits, commands, deadlines."""

    def __init__(self, task_dir: str, warm: Warm | None = None) -> None:
        self._dir, self._warm = task_dir, warm
        with open(f"{task_dir}/launch", "rb") as file:  # noqa: PTH123  # pathlib would double our start time
            self._order = Launch(file.read())
        self._facts = Facts(f"{task_dir}/facts", len(self._order.ranks))
        self._notices = Notices(f"{task_dir}/../notify", self._order.task)
        self._lease_path = f"{task_dir}/lease"
        self._until_s = read_lease(self._lease_path, INFINITE)  # on that of `now`: the ranks may run until then
        self._freezer = Freezer()
        self._poll = select.poll()
        self._ranks: list[Rank] = []
        self._by_fd: dict[int, Rank] = {}
        self._has_children = True
        self._stop_at_s: float | None = None  # when SIGTERM becomes SIGKILL
        self._killing_since_s: float | None = None
        self._has_complained = False
        self._started_s = 0.0
        self._outcome = ("none", "")
        self._port_name: object = None  # held, never used
        self._complaint = ""  # why nothing holds the task to what it booked
        self._oom_file, self._oom_kills = oom_counter()

    def run(self) -> None:
        """Start the ranks and stay until nothing of them is left."""
        os.chdir("/")
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._commands = os.open(f"{self._dir}/commands", os.O_RDWR | os.O_NONBLOCK)
        self._wakeup = self._catch_signals()
        for fd in (self._commands, self._wakeup):
            self._poll.register(fd, select.POLLIN)
        self._facts.add(f"shim {os.getpid()} {start_ticks(os.getpid())}", is_lasting=False)
        self._facts.flush()
        if self._order.scope:
            self._enter_scope()
        self._await_time()
        while self._has_children:
            self._flush()
            for fd, _ in self._poll.poll(self._timeout_ms()):
                self._ready(fd)
            self._reap()
            self._meet_deadlines()
        self._finish()

    def _catch_signals(self) -> int:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (SIGCHLD, SIGTERM):
            _signal.signal(number, lambda *_: None)
        for number in (1, 2):  # a terminal's HUP and INT are not for us
            _signal.signal(number, _signal.SIG_IGN)
        return reading

    # Starting.

    def _enter_scope(self) -> None:
        """Have systemd make a scope around this process, and in it a control group for the ranks, which can be frozen
        and killed without us."""
        try:
            group = f"{enter_scope(self._order.scope)}/ranks"
            os.mkdir(group)  # noqa: PTH102
        except OSError as error:
            if self._warm and self._warm.is_confined:  # to less than the task has booked
                raise
            self._complaint = f"swarm: memory, processes and GPUs of this task are not limited: {error}"
            return
        self._freezer.group = group
        self._oom_file, self._oom_kills = oom_counter()

    def _await_time(self) -> None:
        """Nothing starts once the time is over: another attempt may be running by then.  A stop ends the waiting."""
        while self._stop_at_s is None:
            self._watch_lease(now())
            if not self._freezer.is_frozen:
                self._start_ranks()
                return
            self._flush()
            for fd, _ in self._poll.poll(self._timeout_ms()):
                self._ready(fd)
        self._has_children = False

    def _start_ranks(self) -> None:
        order = self._order
        checks = []
        for number, env in order.ranks:
            log = LogWriter(f"{order.log_dir}/{number}", order.log_limit_bytes, order.log_head_bytes)
            rank = Rank(number, log)
            self._ranks.append(rank)
            if self._complaint:
                rank.say(self._complaint)
            if order.listen_fd >= 0 and number == 0:
                self._port_name = hold_port_name(order.port)
                os.close(order.listen_fd)  # from here on the port is rank 0's to bind
            warm, self._warm = self._warm, None
            if warm and warm.become(order, env, self._freezer.group):
                self._watch(rank, warm.pid, warm.out, warm.err)
                continue
            try:
                checks.append((rank, self._fork(rank, env)))
            except OSError as error:
                self._not_started(rank, error.errno or 0, "fork", order.argv[0])
        self._started_s = now()
        for rank, check in checks:
            report = os.read(check, 4_096)
            os.close(check)
            if report:
                code, _, what = report.decode("utf-8", "replace").partition(" ")
                self._not_started(rank, int(code), *what.split(" ", 1))
        if self._outcome[0] == "none":
            pids = " ".join(f"{rank.rank}:{rank.pid}:{start_ticks(rank.pid)}" for rank in self._ranks)
            self._facts.add(f"started {time.time():.6f} {pids}", is_lasting=False)
        else:
            self._stop(0.0)

    def _fork(self, rank: Rank, env: list[str]) -> int:
        out, err, check = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
        pid = os.fork()
        if pid == 0:
            self._become(out[1], err[1], check[1], env)
        for _, writing in (out, err, check):
            os.close(writing)
        self._watch(rank, pid, out[0], err[0])
        return check[0]

    def _watch(self, rank: Rank, pid: int, out: int, err: int) -> None:
        rank.pid, rank.is_running = pid, True
        for reading, kind in ((out, STDOUT), (err, STDERR)):
            os.set_blocking(reading, False)
            rank.pipes[reading] = kind
            self._by_fd[reading] = rank
            self._poll.register(reading, select.POLLIN)

    def _become(self, out: int, err: int, check: int, env: list[str]) -> None:
        """In the child: become the rank, or tell through `check` why not.  Never returns."""
        order = self._order
        stage = "setup"
        try:
            os.setsid()
            null = os.open("/dev/null", os.O_RDONLY)
            for source, target in ((null, 0), (out, 1), (err, 2)):
                os.dup2(source, target)
            _signal.set_wakeup_fd(-1)
            for number in (SIGPIPE, SIGXFSZ, 1, 2):  # ignored ones would stay so after exec
                _signal.signal(number, _signal.SIG_DFL)
            os.umask(order.umask)
            forget_protection()
            if self._freezer.group and not write_small(f"{self._freezer.group}/cgroup.procs", b"0"):
                raise OSError("its control group takes no process")
            stage = "user"
            become(order.uid, order.gid, order.groups)
            stage = "workdir"
            os.chdir(order.workdir)
            stage = "exec"
            execute(order.argv, dict(entry.split("=", 1) for entry in env))
        except BaseException as error:  # noqa: BLE001  # nothing may return into the parent's loop
            os.write(check, f"{getattr(error, 'errno', None) or 0} {stage} {error}".encode("utf-8", "replace")[:4_000])
        finally:
            os._exit(127)

    def _not_started(self, rank: Rank, code: int, stage: str, detail: str = "") -> None:
        command = self._order.argv[0]
        if stage == "exec" and code in (errno.ENOENT, errno.ENOTDIR):
            status, kind, text = 127, "not_found", not_found_text(command, self._order.workdir)
        elif stage == "exec" and code not in (errno.EAGAIN, errno.ENOMEM):
            why = "it is not a program (a script needs a first line such as #!/bin/sh)"
            why = why if code == errno.ENOEXEC else os.strerror(code).lower()
            status, kind, text = 126, "not_executable", f"{command}: cannot be executed: {why}"
        elif stage == "workdir":
            status, kind, text = 126, "sync", f"cannot enter working directory {self._order.workdir}: {detail}"
        else:
            status, kind, text = 126, "internal", f"{command}: {stage}: {detail}"
        rank.say(f"swarm: {text}")
        rank.status = status
        if self._outcome[0] == "none":
            self._outcome = (kind, text)
        if not rank.pid:
            self._facts.add(f"exit {rank.rank} {status} 0 0 {time.time():.6f}")

    # Events.

    def _ready(self, fd: int) -> None:
        if fd == self._commands:
            for line in os.read(fd, 4_096).decode("ascii", "replace").split("\n"):
                if line:
                    self._obey(line.split())
        elif fd == self._wakeup:
            if SIGTERM in os.read(fd, 4_096):
                self._stop(self._order.grace_s)
        elif not self._by_fd[fd].is_held:
            rank = self._by_fd[fd]
            if rank.log.is_crowded and not rank.log.make_room():
                self._hold(rank, is_held=True)
            else:
                self._take(fd)

    def _take(self, fd: int) -> bool:
        rank = self._by_fd[fd]
        more = rank.take(fd)
        if fd not in rank.pipes:
            if not rank.is_held:
                self._poll.unregister(fd)
            del self._by_fd[fd]
        return more

    def _hold(self, rank: Rank, *, is_held: bool) -> None:
        """Leave its output in its pipes, so that it has to wait as any process does whose reader is slow."""
        rank.is_held = is_held
        for fd in rank.pipes:
            if is_held:
                self._poll.unregister(fd)
            else:
                self._poll.register(fd, select.POLLIN)

    def _obey(self, words: list[str]) -> None:
        try:
            if words[:1] == ["signal"]:
                self._signal_ranks(int(words[1]))
            elif words[:1] == ["stop"]:
                self._stop(float(words[1]))
            elif words[:1] == ["lease"]:
                self._until_s = read_lease(self._lease_path, self._until_s)
        except (ValueError, IndexError):
            for rank in self._ranks[:1]:
                rank.say(f"swarm: command not understood: {' '.join(words)[:80]}")

    def _signal_ranks(self, number: int) -> None:
        if number == SIGCONT and self._freezer.claim():
            return
        for rank in self._ranks:
            if rank.is_running:
                send(-rank.pid if number in GROUP_SIGNALS else rank.pid, number)

    def _stop(self, grace_s: float) -> None:
        """Frozen ranks get no time to obey, unless their lease is extended: another attempt may be running by now."""
        deadline_s = now() + max(0.0, grace_s)
        if self._stop_at_s is None:
            self._terminate()
            self._stop_at_s = deadline_s
        self._stop_at_s = min(self._stop_at_s, deadline_s)

    def _terminate(self) -> None:
        for number in (SIGTERM,) if self._freezer.is_frozen else (SIGTERM, SIGCONT):
            for rank in self._ranks:
                if rank.is_running:
                    send(-rank.pid, number)
            groups = {rank.pid for rank in self._ranks if rank.is_running}
            for pid, group, _ in descendants(os.getpid()):
                if group not in groups:
                    send(pid, number)

    def _watch_lease(self, now_s: float) -> None:
        """Freeze when the time is over; the file is asked once more first, so a lease that is kept up costs nothing."""
        if now_s < self._until_s and not self._freezer.is_frozen:
            return
        self._until_s = read_lease(self._lease_path, self._until_s)
        if now_s < self._until_s:
            self._thaw()
            return
        was_frozen = self._freezer.is_frozen
        self._freezer.freeze()
        if not was_frozen:
            self._facts.add(f"frozen {time.time():.6f}", is_lasting=False)

    def _thaw(self) -> None:
        if self._freezer.is_frozen:
            self._freezer.thaw()
            self._facts.add(f"thawed {time.time():.6f}", is_lasting=False)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                return
            self._has_children = True
            if pid == 0:
                return
            for rank in self._ranks:
                if rank.pid == pid and rank.is_running:
                    self._rank_exited(rank, status)

    def _rank_exited(self, rank: Rank, status: int) -> None:
        rank.is_running = False
        self._drain(rank)
        was_killed = os.WIFSIGNALED(status) and rank.status is None  # one that never became the command has its code
        signal_number = os.WTERMSIG(status) if was_killed else 0
        code = 0 if signal_number else os.WEXITSTATUS(status)
        code = code if rank.status is None else rank.status
        # In a group of the task's own the kernel may also have killed a child, upon which the rank gave up.
        may_be_oom = signal_number == SIGKILL or bool(code and self._freezer.group)
        is_oom = may_be_oom and self._killing_since_s is None and self._oom_file_grew()
        self._explain(rank, code, is_oom)
        self._facts.add(f"exit {rank.rank} {code} {signal_number} {int(is_oom)} {time.time():.6f}")

    def _drain(self, rank: Rank) -> None:
        """Take what is there now; a stranger may hold the other end, so wait for nothing."""
        for fd in list(rank.pipes):
            for _ in range(DRAIN_READS):
                if not self._take(fd):
                    break
        rank.release()

    def _explain(self, rank: Rank, code: int, is_oom: bool) -> None:
        if is_oom:
            limit = read_file(self._oom_file.replace("memory.events", "memory.max")).strip()
            booked = f"; --mem allows {int(limit) / 2**20:.0f} MiB on this node" if limit.isdigit() else ""
            rank.say(f"swarm: killed by the kernel: out of memory{booked}")
        if not code:
            return
        _, found, module = rank.tail.rpartition(b"ModuleNotFoundError: No module named ")
        if found:
            name = module.split(b"\n", 1)[0].strip(b"'\"; \r").decode("utf-8", "replace")
            rank.say(
                f"swarm: the module {name!r} is not installed where this job ran. Use an environment of the nodes with"
                " --venv PATH, have one built with --requirements FILE, or ship your own modules with --sync."
            )
        is_early = now() - self._started_s < PORT_CONFLICT_S
        if rank.rank == 0 and self._order.listen_fd >= 0 and is_early and speaks_of_port(rank.tail, self._order.port):
            self._outcome = (
                "port_taken",
                f"port {self._order.port} was taken by another process before rank 0 bound it",
            )

    def _oom_file_grew(self) -> bool:
        return bool(self._oom_file) and count_oom_kills(self._oom_file) > self._oom_kills

    def _meet_deadlines(self) -> None:
        now_s = now()
        for rank in self._ranks:
            rank.release(now_s)
            if rank.is_held and rank.log.make_room():
                self._hold(rank, is_held=False)
        if self._has_children and not any(rank.is_running for rank in self._ranks):
            self._stop(LEFTOVER_GRACE_S)
        self._watch_lease(now_s)
        if self._stop_at_s is None or now_s < self._stop_at_s or not self._has_children:
            return
        if self._killing_since_s is None:
            self._killing_since_s = now_s
        remaining = descendants(os.getpid())
        is_first = now_s == self._killing_since_s
        if not (is_first and write_small(f"{self._freezer.group}/cgroup.kill", b"1")):
            end_descendants()
        if now_s - self._killing_since_s > STUBBORN_S and not self._has_complained:
            self._has_complained = True
            self._ranks[0].say(
                f"swarm: killed, but the kernel has not let go of: {[pid for pid, *_ in remaining][:20]}"
            )

    def _timeout_ms(self) -> int | None:
        if not self._has_children:
            return 0
        waits = [when_s - now() for rank in self._ranks if (when_s := rank.release_at_s) != INFINITE]
        if self._killing_since_s is not None:
            waits.append(1.0 if self._has_complained else KILL_INTERVAL_S)
        elif self._stop_at_s is not None:
            waits.append(self._stop_at_s - now())
        if self._freezer.is_frozen:
            waits.append(FROZEN_INTERVAL_S)
        elif self._until_s != INFINITE:
            waits.append(min(LOOK_S, self._until_s - now()))  # the wait itself stands still while the machine sleeps
        if any(rank.is_held for rank in self._ranks):
            waits.append(CROWDED_INTERVAL_S)
        if self._notices.waiting or any(rank.has_news for rank in self._ranks):
            waits.append(NOTICE_INTERVAL_S)
        return None if not waits else max(0, int(min(waits) * 1_000) + 1)

    # Telling.

    def _flush(self, *, is_last: bool = False) -> None:
        """Files first, then the notice: whoever is told finds the news there."""
        try:
            has_facts = self._facts.flush()
        except OSError:
            has_facts = False  # kept and tried again: the room is reserved, so this is a failing disk
            time.sleep(NOTICE_INTERVAL_S)
        now_s = now()
        for rank in self._ranks:
            if rank.has_news and (is_last or now_s - rank.noticed_s >= NOTICE_INTERVAL_S):
                rank.noticed_s, rank.has_news = now_s, False
                self._notices.send(f"log {rank.rank}")
        if has_facts:
            self._notices.send("facts")
        self._notices.retry()

    def _finish(self) -> None:
        for rank in self._ranks:
            self._drain(rank)
            rank.log.close()
        kind, detail = self._outcome
        self._facts.add(f"exited {time.time():.6f} {kind} {detail[:800]}")
        for _ in range(LAST_WORDS_ATTEMPTS):
            self._flush(is_last=True)
            if not self._facts.is_waiting:
                return
            time.sleep(1.0)


def confine(account: str, argv: list[str]) -> int:
    """Run one command as an account ("UID,GID,GROUP..."; uid -1: our own) and end all that it leaves; its exit code.

    Whatever outlives the command, in a session of its own too, is killed before this returns.  SIGTERM, and the death
    of whoever started us, end the command the same way.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, SIGTERM)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [SIGTERM])
    pid = os.fork()
    if pid == 0:
        try:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [SIGTERM])
            os.umask(0o022)
            forget_protection()
            uid, gid, *groups = map(int, account.split(","))
            become(uid, gid, groups)
            execute(argv, dict(os.environ))
        except BaseException as error:  # noqa: BLE001  # nothing may return into the parent's code
            os.write(2, f"{argv[0]}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(127)
    _signal.signal(SIGTERM, lambda *_: end_descendants())
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [SIGTERM])
    status = os.waitpid(pid, 0)[1]
    end_all_descendants()
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def enter_scope(order: list[str]) -> str:
    """Have systemd make a scope around this process by that command; its control group's folder.  Raises OSError."""
    argv = [word.replace(OWN_PID, str(os.getpid())) for word in order]
    name = next(word for word in argv if word.endswith(".scope")).encode()
    asked = os.posix_spawn(argv[0], argv, {}, file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)])
    deadline_s = now() + (SCOPE_S if os.waitpid(asked, 0)[1] == 0 else 0.0)
    path = read_file("/proc/self/cgroup").strip()
    while not path.endswith(name):
        if now() >= deadline_s:
            raise OSError("systemd has made no scope for it")
        time.sleep(SCOPE_INTERVAL_S)
        path = read_file("/proc/self/cgroup").strip()
    return f"{CGROUPS}{path.rpartition(b'::')[2].decode()}"


def end_all_descendants() -> None:
    """SIGKILL for all descendants of this process, again and again until none is left."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                end_descendants()
                time.sleep(KILL_INTERVAL_S)
        except ChildProcessError:
            return


def end_descendants() -> None:
    """SIGKILL for all descendants of this process; one that forks meanwhile leaves a child for the next call."""
    for pid, _, _ in descendants(os.getpid()):
        send(pid, SIGKILL)


def become(uid: int, gid: int, groups: list[int]) -> None:
    """Switch to an account for good; uid -1: stay who we are.  Raises OSError."""
    if uid >= 0:
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)


def execute(argv: list[str], env: dict[str, str]) -> None:
    """Replace this process; raise the OSError that describes best why that failed."""
    name = argv[0]
    if "/" in name:
        os.execve(name, argv, env)  # noqa: S606  # what a job may run is its owner's choice
    refused: OSError | None = None
    for folder in env.get("PATH", os.defpath).split(":"):
        try:
            os.execve(f"{folder or '.'}/{name}", argv, env)  # noqa: S606
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = refused or error
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


OF_THE_SHELL = (".", "alias", "cd", "eval", "export", "module", "set", "shopt", "source", "ulimit", "umask", "unset")
KEYWORDS = ("[[", "case", "exec", "for", "function", "if", "time", "trap", "until", "while", "{")  # of a shell, too
OF_SLURM = ("srun", "sbatch", "salloc")


def not_found_text(command: str, workdir: str) -> str:
    """Why a command was not found, as precisely as can be told."""
    path = f"{workdir}/{command}"
    if "/" in command and os.access(path if command[0] != "/" else command, os.F_OK):
        return f"{command}: the interpreter named in its first line does not exist on this node"
    hint = ""
    if "/" not in command and os.access(path, os.F_OK):
        written = f"python {command}" if command.endswith(".py") else f"./{command}"
        hint = f"a file of that name is in the working directory: write {written}"
    elif any(blank in command for blank in " \t\n"):
        hint = "it is one word with blanks in it: leave its quotes out, or write bash -c '...'"
    elif command in OF_THE_SHELL + KEYWORDS:
        hint = "it is part of the shell: write bash -c '...'"
    elif command in OF_SLURM:
        hint = "it is part of Slurm: each rank runs the command itself, so leave it out"
    elif "=" in command:
        hint = f"a variable is set by an option: -e {command}"
    return f"{command}: command not found" + (f" ({hint})" if hint else "")


def speaks_of_port(tail: bytes, port: int) -> bool:
    """True when the last words on stderr say that this port was in use."""
    return b"ddress already in use" in tail and str(port).encode() in tail


def hold_port_name(port: int) -> object:
    """Tell the agents of this machine, for as long as what is returned lives, that the port is promised to a rank."""
    from _socket import AF_UNIX, SOCK_STREAM, socket  # noqa: PLC0415

    name = socket(AF_UNIX, SOCK_STREAM)
    try:
        name.bind(PORT_NAME % port)
    except OSError:  # another task's that was given this port as a last resort: the name says so for both
        name.close()
    return name


def keep_from_children() -> None:
    """Only the standard three may reach the ranks: the lock would outlive us in them, strays of the agent as well."""
    low, high = INHERITED_FDS
    os.closerange(3, low)
    os.closerange(high + 1, FDS_LIMIT)
    for fd in INHERITED_FDS:
        if os.access(f"/proc/self/fd/{fd}", os.F_OK):
            os.set_inheritable(fd, False)


def prctl(option: int, value: int) -> None:
    """As prctl(2).  Raises OSError."""
    # ctypes itself costs 4 ms for its type machinery; its C part does this call alone.
    from _ctypes import call_function, dlopen, dlsym  # noqa: PLC0415

    here = dlopen(None, 0)  # type: ignore[arg-type]  # None is the program itself, as in dlopen(3)
    if call_function(dlsym(here, "prctl"), (option, value, 0, 0, 0)) != 0:
        raise OSError(f"prctl({option}) failed")


def forget_protection() -> None:
    """The agent and this process are the last that the kernel kills when memory runs out; ranks are as any other."""
    if read_file("/proc/self/oom_score_adj").startswith(b"-"):
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"0")
        os.close(score)


def now() -> float:
    """Seconds on the clock of the agent's core, on which time is counted here, too. It goes on while the machine
    sleeps, for the others' time does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def send(target: int, number: int) -> None:
    """Signal a process, or a group by its negative number, if it is still there and ours to signal."""
    try:
        os.kill(target, number)
    except (ProcessLookupError, PermissionError):
        return


def read_stat(pid: int | str) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the state on, or None when the process is gone."""
    data = read_file(f"/proc/{pid}/stat")
    return data[data.rfind(b")") + 2 :].split() if data else None


def read_file(path: str) -> bytes:
    """A kernel file of any length; empty when it cannot be read.  (`open` would load a text codec first.)"""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    data = b""
    try:
        while piece := os.read(fd, READ_BYTES):
            data += piece
    except OSError:  # the process has gone meanwhile
        return b""
    finally:
        os.close(fd)
    return data


def write_small(path: str, data: bytes) -> bool:
    """Write to a kernel file; False when that cannot be done."""
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, data)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it is gone.  Tells a reused pid from the old one."""
    fields = read_stat(pid)
    return int(fields[19]) if fields else 0


def read_lease(path: str, known_s: float) -> float:
    """The time in a lease file, seconds on CLOCK_BOOTTIME; `known_s` when there is no file or it makes no sense."""
    try:
        return float(read_twice(path))
    except ValueError:
        return known_s


def read_twice(path: str) -> bytes:
    """The word that is in a file twice; empty when there is no file or it makes no sense.

    While the agent rewrites it a reader may see some old digits among new ones: hence twice.
    """
    for _ in range(3):
        first, _, second = read_file(path).partition(b" ")
        if first and first == second.strip():
            return first
    return b""


def reader_text(position: int, until_s: float) -> bytes:
    """The content of a reader's file, always of the same length: until then nothing behind the position may go."""
    word = f"{position:014x}@{until_s:.3f}".ljust(LEASE_BYTES // 2 - 1, "0")
    return f"{word} {word}\n".encode()


def lease_text(until_s: float) -> bytes:
    """The content of a lease file, always of the same length, so that one write replaces it."""
    text = f"{max(0.0, until_s):.6f}" if until_s < LEASE_S_MAX else "inf"
    return f"{text} {text}".ljust(LEASE_BYTES - 1).encode() + b"\n"


def descendants(*roots: int) -> list[tuple[int, int, bytes]]:
    """(pid, process group, state) of all processes below these, parents before their children."""
    children = processes_by_parent()
    found: list[tuple[int, int, bytes]] = []
    todo = list(roots)
    while todo:
        below = children.get(todo.pop(), ())
        found.extend(below)
        todo.extend(pid for pid, _, _ in below)
    return found


def listed_children(pid: int) -> list[int]:
    """Children of all threads of a process; none when it is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return []
    return [int(child) for thread in threads for child in read_file(f"/proc/{pid}/task/{thread}/children").split()]


def processes_by_parent() -> dict[int, list[tuple[int, int, bytes]]]:
    """(pid, process group, state) of all processes, under their parent's pid."""
    children: dict[int, list[tuple[int, int, bytes]]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            fields = read_stat(name)
            if fields:
                children.setdefault(int(fields[1]), []).append((int(name), int(fields[2]), fields[0]))
    return children


def oom_counter() -> tuple[str, int]:
    """(file, kills so far) of our memory cgroup; ('', 0) where there is none."""
    for line in read_file("/proc/self/cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file_name = f"{CGROUPS}{path}/memory.events"
        elif "memory" in controllers.split(","):
            file_name = f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        else:
            continue
        if os.access(file_name, os.R_OK):
            return file_name, count_oom_kills(file_name)
    return "", 0


def count_oom_kills(file_name: str) -> int:
    """The kernel's counter `oom_kill` of a memory cgroup."""
    for line in read_file(file_name).splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill":
            return int(value)
    return 0


def serve() -> None:
    """Fork a shim for each directory that comes through the socket at descriptor 0, until its other end is closed.

    With a directory come its lock and, if there is one, the rendezvous socket; back go the pid and a pidfd.
    """
    import _ctypes  # noqa: F401, PLC0415  # for all shims at once
    from _socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket  # noqa: PLC0415

    agent = socket(fileno=0)
    events = select.poll()
    events.register(0, select.POLLIN)
    pids: dict[int, int] = {}  # by pidfd
    while True:
        for fd, _ in events.poll():
            if fd:
                events.unregister(fd)
                os.close(fd)
                os.waitpid(pids.pop(fd), 0)
                continue
            directory, rights, _, _ = agent.recvmsg(4_096, CMSG_SPACE(8))
            if not directory:
                return
            raw = rights[0][2]
            given = [int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw), 4)]
            try:
                pid = os.fork()
            except OSError:
                agent.send(b"0")
                continue
            if pid == 0:
                become_shim(os.fsdecode(directory), given)
            pidfd = os.pidfd_open(pid)
            pids[pidfd] = pid
            events.register(pidfd, select.POLLIN)
            for each in given:
                os.close(each)
            agent.sendmsg([b"%d" % pid], [(SOL_SOCKET, SCM_RIGHTS, pidfd.to_bytes(4, sys.byteorder))])


def become_shim(directory: str, given: list[int]) -> None:
    """In a forked process: what the agent does for a shim that it starts by itself.  Does not return."""
    try:
        os.setsid()
        given.append(os.open(f"{directory}/shim.err", os.O_WRONLY | os.O_CREAT, 0o600))
        kept = [os.dup2(fd, SPARE_FD + place) for place, fd in enumerate(given)]
        os.closerange(3, SPARE_FD)
        os.dup2(kept[-1], 2)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        for fd, place in zip(kept[:-1], reversed(INHERITED_FDS), strict=False):
            os.dup2(fd, place)
        keep_from_children()
        warm = Warm(directory) if os.access(f"{directory}/warm", os.F_OK) else None
        task_dir = warm.wait() if warm else directory
        if task_dir:
            Shim(task_dir, warm).run()
    except BaseException:  # noqa: BLE001  # as an interpreter of its own would end
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "confine":
        sys.exit(confine(sys.argv[2], sys.argv[3:]))
    if sys.argv[1] == "serve":
        try:
            serve()
        except OSError:
            os._exit(1)  # the agent is gone
        os._exit(0)
    keep_from_children()
    Shim(sys.argv[1]).run()
    os._exit(0)  # all is on disk; tearing the interpreter down would cost 2 ms for nothing
